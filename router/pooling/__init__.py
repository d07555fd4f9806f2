"""`/v1/embeddings` and `/score`: vectors of texts, and the similarity of two texts."""
