"""Errors that the engine raises for models it does not serve."""


class UnsupportedModelError(ValueError):
    """A model that needs something the engine would compute wrongly; the message names it."""
