"""Quantized weights: what they are, how checkpoints store them, and rounding at load."""
