"""Drafting a block of tokens in one pass over the target's hidden states: DFlash."""
