"""C++ kernels, compiled for the machine at first use, on the threads of torch's own OpenMP runtime."""
