"""Drafting from the target's own hidden states with one decoder layer: EAGLE-1, EAGLE-2, EAGLE-3 and 3.1."""
