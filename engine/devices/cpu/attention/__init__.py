"""The CPU attention kernel: C++ that is compiled for the machine at first use, and its Python side."""
