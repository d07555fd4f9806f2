"""Changes of the number of workers of each role, by request of an operator or automatically."""
