"""Loading: reading a checkpoint, probing it, packing its weights and choosing the forward that runs it."""
