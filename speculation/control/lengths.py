"""How long prompts are beside what comes of them: what it takes to read one is to be earned back by then."""

from __future__ import annotations

_FIRST_READ, _FIRST_WRITTEN = 256.0, 128.0
"""Taken for the one request that ended before all others."""
_FADING = 0.95
"""For each request that ends."""


class Lengths:
    """Of the requests that ended of late."""

    def __init__(self) -> None:
        self._read, self._written = _FIRST_READ, _FIRST_WRITTEN

    def observe(self, num_read: int, num_written: int) -> None:
        """A request has ended with so many tokens, after as many of its prompt were computed here."""
        self._read = _FADING * self._read + num_read
        self._written = _FADING * self._written + num_written

    @property
    def read_per_written(self) -> float:
        """Tokens of prompts for each token that is generated."""
        return self._read / self._written
