"""Costs and gains of quantized weights: memory, speed, and how well the model still predicts."""
