"""Decoding on CUDA devices: a model's forward in few kernels."""
