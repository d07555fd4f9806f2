"""The operators of recurrent layers on CUDA devices in Triton: see `operators`."""
