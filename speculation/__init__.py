"""Drafting and lossless verification: a step yields several tokens of a request, the same as without."""
