"""The draft place that similar requests of one decode worker use, chosen by the token rates observed.

Sometimes all of these requests move to another place for a trial: only a whole batch shows its rate.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from costs.drafting import Explorer
from router.placement.drafts.prospects import (
    DraftDecision,
    DraftFacts,
    DraftOption,
    DraftPlace,
    DraftSite,
    Prospects,
    SeenRates,
    decide,
    load_of,
)

TRIAL_S = 1.0
"""[seconds of decoding] Length of a trial: enough for several requests of a hundred tokens each."""
SETTLES_S = 2.0
"""[seconds of decoding] Time before the first trial, until the rate of the best place is known."""
LEAST_LOSS = 0.1
"""[share] Least price of a trial, since its requests move there and back: at most one trial in 10 s."""


class ExpectedTokens(NamedTuple):
    """Expected output of one of `rows` requests: `per_s` tokens a second after `num_tokens` at `since`."""

    place: DraftPlace
    rows: float
    per_s: float
    since: float
    num_tokens: int


class DraftKind:
    """The requests of one decode worker and class with equal settings. All use one `place` if that pays.

    `tried` is called when a trial begins. Time counts only while the worker decodes. The first trial is free.
    """

    def __init__(self, tried: Callable[[DraftSite], None] = lambda where: None) -> None:
        self._tried = tried
        self.seen = SeenRates()
        self.place: DraftPlace | None = None
        self._explorer = Explorer(seconds=TRIAL_S)
        self._passed_s = self._left_s = 0.0
        self._trial: DraftPlace | None = None
        self._counts: Counter[DraftPlace] = Counter()

    @property
    def trial(self) -> DraftPlace | None:
        """The place where all of the requests draft during a trial; None while no trial runs."""
        return self._trial if self._left_s > 0 else None

    def decide(self, facts: DraftFacts, prospects: Prospects) -> DraftDecision:
        """Return where a request drafts; may begin a trial, in which all of the requests draft elsewhere."""
        facts = replace(facts, others=self.place)
        decision = decide(facts, prospects)
        self.place = decision.place
        self._consider_trial(decision)
        return decide(replace(facts, trial=self.trial), prospects) if self.trial is not None else decision

    def _consider_trial(self, decision: DraftDecision) -> None:
        """Begin a trial of another place if the trial budget pays for it. Cheap trials are more frequent."""
        best = decision.chosen
        others = [option for option in decision.options if option.place != best.place]
        if self.trial is not None or self._passed_s < SETTLES_S or not others or best.worth <= 0:
            return
        prices = {each.place: TRIAL_S * max(1 - each.worth / best.worth, LEAST_LOSS) for each in others}
        place = min(prices, key=lambda each: prices[each] * (1 + self._counts[each]))
        if self._explorer.buys(prices[place]):
            self._trial, self._left_s = place, TRIAL_S
            self._counts[place] += 1
            self._tried(place.where)

    def note(
        self, expected: ExpectedTokens, answered_at: float, num_tokens: int, rows: float, now: float
    ) -> None:
        """Learn from a request, first answered at `answered_at`, with `num_tokens` now in a batch of `rows`.

        The rate is ignored if the batch has changed: one planned as the only request gains less among 16.
        """
        seconds = now - max(expected.since, answered_at)
        if seconds <= 0:
            return
        if load_of(rows) == load_of(expected.rows):
            tokens = num_tokens - expected.num_tokens
            self.seen.note(expected.place, expected.rows, seconds, tokens, expected.per_s * seconds)
        self.pass_time(seconds / expected.rows)

    def pass_time(self, seconds: float) -> None:
        self._passed_s += seconds
        self._left_s -= seconds
        self._explorer.passed(seconds)


def expect(option: DraftOption, rows: float, since: float, num_tokens: int) -> ExpectedTokens:
    """Return the output expected of one of `rows` requests that all draft at the option's place."""
    rows = max(rows, 1.0)
    return ExpectedTokens(option.place, rows, option.rate / (option.correction * rows), since, num_tokens)
