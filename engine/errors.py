"""Errors the engine raises for what it will not serve."""


class UnsupportedModelError(ValueError):
    """The model asks for something the engine would compute wrongly; the message names it."""
