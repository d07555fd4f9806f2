"""The loss of the placement policy against the best fixed mode, over twelve workloads."""
