"""`/v1/embeddings` and `/score`: texts as vectors, and how near two of them are."""
