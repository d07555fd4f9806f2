"""Drafting and lossless verification."""
