"""Reads GGUF, the single-file format of llama.cpp: metadata as Hugging Face files, tensors as stored."""
