"""The draft place that similar requests of one decode worker use, corrected by the token rates observed."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from router.placement.drafts.prospects import (
    DraftDecision,
    DraftFacts,
    DraftOption,
    DraftPlace,
    Prospects,
    SeenRates,
    decide,
    load_of,
)


class ExpectedTokens(NamedTuple):
    """Expected output of one of `rows` requests: `per_s` tokens a second after `num_tokens` at `since`."""

    place: DraftPlace
    rows: float
    per_s: float
    since: float
    num_tokens: int


class DraftKind:
    """The requests of one decode worker and class with equal settings. All use one `place` if that pays."""

    def __init__(self) -> None:
        self.seen = SeenRates()
        self.place: DraftPlace | None = None

    def decide(self, facts: DraftFacts, prospects: Prospects) -> DraftDecision:
        decision = decide(replace(facts, others=self.place), prospects)
        self.place = decision.place
        return decision

    def note(
        self, expected: ExpectedTokens, answered_at: float, num_tokens: int, rows: float, now: float
    ) -> None:
        """Learn from a request, first answered at `answered_at`, with `num_tokens` now in a batch of `rows`.

        The rate is ignored if the batch has changed: one planned as the only request gains less among 16.
        """
        seconds = now - max(expected.since, answered_at)
        if seconds > 0 and load_of(rows) == load_of(expected.rows):
            tokens = num_tokens - expected.num_tokens
            self.seen.note(expected.place, expected.rows, seconds, tokens, expected.per_s * seconds)


def expect(option: DraftOption, rows: float, since: float, num_tokens: int) -> ExpectedTokens:
    """Return the output expected of one of `rows` requests that all draft at the option's place."""
    rows = max(rows, 1.0)
    return ExpectedTokens(option.place, rows, option.rate / (option.correction * rows), since, num_tokens)
