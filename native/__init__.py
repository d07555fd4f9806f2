"""C++ kernels built for the machine at first use, and torch's own OpenMP runtime for them."""
