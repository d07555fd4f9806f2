"""Training of draft heads for a frozen target, from text."""
