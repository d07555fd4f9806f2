"""Spends a small share of the time on places that seem worse, since only a trial shows what they bring.

All requests that are alike move at once: a place shows its rate only in a batch that drafts there as a
whole.
"""

from __future__ import annotations

from collections import Counter

from router.placement.drafts.interface import DraftDecision, DraftMaker

TRIAL_S = 1.0
"""[seconds of the worker] The length of a trial: some requests of a hundred tokens each."""
SHARE = 0.01
"""[share] The most of the worker's time that trials may lose."""
SETTLES_S = 2.0
"""[seconds of the worker] The time until the best place is known well enough to compare a trial with it."""
LEAST_LOSS = 0.1
"""[share] The least loss to assume for a trial, since its requests move there and back: at most one trial in
10 s.
"""


class Trials:
    """Decides when to try another place. Its time passes as the worker decodes. The first trial is free,
    since predictions are worst then.
    """

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
        """The place where requests are to draft for a trial."""
        return self._place if self._left_s > 0 else None

    def consider(self, decision: DraftDecision) -> bool:
        """Return whether a trial begins in place of the best option: cheap trials come more often."""
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
