"""Drafting methods without weights: they look up likely tokens, or let the model guess them."""
