"""Drafting and lossless verification: several tokens of a request in one step, the same tokens as without."""
