"""LoRA adapters (Hu et al., 2021): products of small rank beside those of a model's linear layers."""
