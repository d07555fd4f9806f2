"""Learns the speed of a peer's wire from the growth of its totals between two observations."""

from __future__ import annotations

_FADE = 0.95
"""Weight of all earlier observations against the newest: some 20 count."""


class WireSpeed:
    """A least-squares fit of relative errors: seconds = `latency_s` * pieces + bytes / `bytes_per_s`."""

    def __init__(self) -> None:
        self._last = (0.0, 0.0, 0.0)
        self._pieces = self._bytes = self._mixed = 0.0
        self._pieces_s = self._bytes_s = 0.0
        self.latency_s = 0.0
        self.bytes_per_s = 0.0
        """0 until something was measured."""

    def look(self, pieces: float, nbytes: float, seconds: float) -> None:
        """Observe the totals. An observation counts only if all three have grown."""
        gained = (pieces - self._last[0], nbytes - self._last[1], seconds - self._last[2])
        if min(gained) <= 0:
            return
        self._last = (pieces, nbytes, seconds)
        each, size, took = gained
        self._pieces = _FADE * self._pieces + each * each / took**2
        self._bytes = _FADE * self._bytes + size * size / took**2
        self._mixed = _FADE * self._mixed + each * size / took**2
        self._pieces_s = _FADE * self._pieces_s + each / took
        self._bytes_s = _FADE * self._bytes_s + size / took
        self._solve()

    def _solve(self) -> None:
        """Solve the fit. If all observations were alike, latency and bandwidth cannot be told apart: then
        all of it is bandwidth.
        """
        independent = self._pieces * self._bytes - self._mixed**2
        if independent > 1e-3 * self._pieces * self._bytes:
            per_piece = (self._pieces_s * self._bytes - self._bytes_s * self._mixed) / independent
            per_byte = (self._bytes_s * self._pieces - self._pieces_s * self._mixed) / independent
            if per_piece >= 0 and per_byte > 0:
                self.latency_s, self.bytes_per_s = per_piece, 1 / per_byte
                return
        self.latency_s, self.bytes_per_s = 0.0, self._bytes / self._bytes_s
