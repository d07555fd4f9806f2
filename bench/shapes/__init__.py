"""Model folders with random weights and the shapes of real models, for timing."""
