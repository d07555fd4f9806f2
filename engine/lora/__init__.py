"""LoRA adapters (Hu et al., 2021): low-rank products added to the outputs of a model's linear layers."""
