"""Spends a small share of the time on what seems to lose, since what is not tried is not learned about."""

from __future__ import annotations

from speculation.control.settings import Settings


class Explorer:
    """A budget of seconds, earned as a share of the time and charged with what trials really lost.

    A trial is paid in advance, since requests that come or go may leave its steps unmeasured. The budget
    saves for the next trial only. In a trial the batch does the opposite of what seems best.
    """

    def __init__(self, settings: Settings) -> None:
        self._share = settings.trial_share
        self._seconds = 0.0
        self._rate = 0.0
        """Of the trial that runs: the tokens a second that were given up for it."""
        self._paid = 0.0
        """In advance for the trial that runs, of which no window was measured yet."""

    def passed(self, seconds: float, tokens: float) -> None:
        """So much time has passed, in which so many tokens were generated."""
        self._seconds += self._share * seconds
        if self._rate:
            self._seconds += self._paid - min(max(seconds - tokens / self._rate, 0.0), seconds)
            self._paid = 0.0

    def end_trial(self) -> None:
        """Another plan begins."""
        self._rate = self._paid = 0.0

    def tries(self, price: float, rate: float) -> bool:
        """Whether a trial starts that is expected to lose so many seconds; `rate` tokens a second are given
        up for it.
        """
        self._seconds = min(self._seconds, price)
        if self._seconds < price:
            return False
        self._seconds -= price
        self._rate, self._paid = rate, price
        return True

    def buys(self, seconds: float) -> bool:
        """Whether so many seconds are there to be spent at once; then they are."""
        if self._seconds < seconds:
            return False
        self._seconds -= seconds
        return True
