"""Drafting methods that need no weights: what a model will say is looked up, or guessed by itself."""
