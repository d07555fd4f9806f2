"""`/v1/embeddings`, `/score` and `/v1/rerank`: vectors of texts, and the similarity of two texts."""
