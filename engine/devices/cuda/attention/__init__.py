"""Attention on CUDA devices in Triton: see `backend`."""
