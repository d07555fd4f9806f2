"""Builds C++ kernels for the machine at first use, and finds torch's own OpenMP runtime for them."""
