"""Quantized weights, the layouts in which checkpoints store them, and rounding at load."""
