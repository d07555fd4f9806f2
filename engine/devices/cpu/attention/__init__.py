"""The CPU attention kernel: C++ compiled for the machine at first use, and its Python side."""
