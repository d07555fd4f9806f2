"""Spends a small share of the time on places that seem to lose, since what is not tried is not known.

All requests that are alike move at once: what a place brings shows in a batch that drafts there as a whole.
"""

from __future__ import annotations

from collections import Counter

from router.placement.drafts.interface import DraftDecision, DraftMaker

TRIAL_S = 1.0
"""[seconds of the worker] Of a trial: some requests of a hundred tokens each."""
SHARE = 0.01
"""[share] Of the worker's time that trials may lose."""
SETTLES_S = 2.0
"""[seconds of the worker] Until what is best is known well enough for a trial to compare with."""
LEAST_LOSS = 0.1
"""[share] That a trial is taken to lose at least, for its requests move there and back: one in 10 s at the
most."""


class Trials:
    """Time passes as the worker decodes. The first trial is free, when predictions are worst."""

    def __init__(self) -> None:
        self._passed_s = 0.0
        self._saved_s = TRIAL_S
        self._left_s = 0.0
        self._place: DraftMaker | None = None
        self._counts: Counter[DraftMaker] = Counter()

    def passed(self, seconds: float) -> None:
        self._passed_s += seconds
        self._saved_s += SHARE * seconds
        self._left_s -= seconds

    @property
    def place(self) -> DraftMaker | None:
        """Where requests are to draft for a trial."""
        return self._place if self._left_s > 0 else None

    def consider(self, decision: DraftDecision) -> bool:
        """Whether a trial begins instead of what is best: cheap ones come more often."""
        if self.place is not None or self._passed_s < SETTLES_S:
            return False
        best = decision.chosen
        others = [option for option in decision.options if option.place.maker != best.place.maker]
        if not others or best.worth <= 0:
            return False
        prices = {each.place.maker: TRIAL_S * max(1 - each.worth / best.worth, LEAST_LOSS) for each in others}
        place = min(prices, key=lambda each: prices[each] * (1 + self._counts[each]))
        if self._saved_s < prices[place]:
            return False
        self._saved_s -= prices[place]
        self._place, self._left_s = place, TRIAL_S
        self._counts[place] += 1
        return True
