"""Changes the number of workers of each role, by request of an operator and automatically."""
