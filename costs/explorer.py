"""Spends a small share of the time on what seems to lose, since what is not tried is not learned about."""

from __future__ import annotations

TRIAL_SHARE = 0.01
"""[share] The most of the time that trials may lose."""


class Explorer:
    """A budget of seconds, earned as a share of the time. It saves for the next trial only."""

    def __init__(self, share: float = TRIAL_SHARE, seconds: float = 0.0) -> None:
        self._share, self._seconds = share, seconds

    def passed(self, seconds: float) -> None:
        self._seconds += self._share * seconds

    def tries(self, price: float) -> bool:
        """Return whether a trial starts that is expected to lose so many seconds."""
        self._seconds = min(self._seconds, price)
        return self.buys(price)

    def buys(self, seconds: float) -> bool:
        """Return whether so many seconds are there to be spent at once; then they are."""
        if self._seconds < seconds:
            return False
        self._seconds -= seconds
        return True
