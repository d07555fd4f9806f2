"""Matrix products of a model's weights."""
