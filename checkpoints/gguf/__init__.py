"""GGUF, llama.cpp's single-file format: metadata as Hugging Face files, tensors as stored."""
