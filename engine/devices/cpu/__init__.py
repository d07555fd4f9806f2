"""Native kernels and the native decoder, for x86 CPUs."""
