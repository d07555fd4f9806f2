"""Sampling on a CUDA device, in Triton: the tokens of `native.py`, which the host waits for once."""
