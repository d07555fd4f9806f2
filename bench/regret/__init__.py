"""How much the placement policy loses to the best fixed mode, over twelve workloads."""
