"""Costs and gains of quantized weights: memory, speed, and quality of predictions."""
