"""Trials of options that seem worse, at a small share of the time: without trials nothing is learned."""

from __future__ import annotations

TRIAL_SHARE = 0.01
"""[share] The largest share of the time that trials may lose."""


class Explorer:
    """A budget of seconds, earned as a share of the time that passes; it saves for one trial at most."""

    def __init__(self, share: float = TRIAL_SHARE, seconds: float = 0.0) -> None:
        self._share, self._seconds = share, seconds

    def passed(self, seconds: float) -> None:
        self._seconds += self._share * seconds

    def tries(self, price: float) -> bool:
        """Return whether to start a trial that is expected to lose `price` seconds; if so, spend them."""
        self._seconds = min(self._seconds, price)
        return self.buys(price)

    def buys(self, seconds: float) -> bool:
        """Spend `seconds` if the budget covers them; return whether it did."""
        if self._seconds < seconds:
            return False
        self._seconds -= seconds
        return True
