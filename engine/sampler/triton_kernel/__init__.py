"""Sampling on a CUDA device, in Triton: the same tokens as `native.py`, with one wait of the host."""
