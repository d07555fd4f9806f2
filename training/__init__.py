"""Training: one loop for the bundled models and for draft heads, and the heads themselves."""
