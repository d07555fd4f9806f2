"""What is learned of requests that are alike, on one decode worker: what drafts bring, by who makes them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from router.placement.drafts.decide import decide
from router.placement.drafts.interface import DraftDecision, DraftFacts, DraftMaker, DraftOption, DraftSite
from router.placement.drafts.prospects import Prospects
from router.placement.drafts.seen import SeenRates, load_of
from router.placement.drafts.trials import Trials


class ExpectedTokens(NamedTuple):
    """Of one of `rows` requests, which had `num_tokens` at `since`: `per_s` more a second, uncorrected."""

    maker: DraftMaker
    rows: float
    per_s: float
    since: float
    num_tokens: int


class DraftKind:
    """Requests of one decode worker and class that ask for the same. All draft with `maker` if that pays.

    `tried` is told of each trial that begins.
    """

    def __init__(self, tried: Callable[[DraftSite], None] = lambda where: None) -> None:
        self._tried = tried
        self.seen = SeenRates()
        self.trials = Trials()
        self.maker: DraftMaker | None = None

    def decide(self, facts: DraftFacts, prospects: Prospects) -> DraftDecision:
        """DraftSite a request drafts, or all of them for a trial that begins."""
        facts = replace(facts, others=self.maker)
        decision = decide(facts, prospects)
        self.maker = decision.place.maker
        begins = self.trials.consider(decision)
        trial = self.trials.place
        if begins and trial is not None:
            self._tried(trial.where)
        return decide(replace(facts, trial=trial), prospects) if trial is not None else decision

    def note(
        self, expected: ExpectedTokens, answered_at: float, num_tokens: int, rows: float, now: float
    ) -> None:
        """The request, which has answered since then, has `num_tokens` by now, beside as many as `rows` says.

        Nothing is learned while requests come or go: one of 16 that was planned as the only one brings few.
        """
        seconds = now - max(expected.since, answered_at)
        if seconds <= 0:
            return
        if load_of(rows) == load_of(expected.rows):
            tokens = num_tokens - expected.num_tokens
            self.seen.note(expected.maker, expected.rows, seconds, tokens, expected.per_s * seconds)
        self.trials.passed(seconds / expected.rows)


def expect(option: DraftOption, rows: float, since: float, num_tokens: int) -> ExpectedTokens:
    """Of one of so many requests that drafts as `option` says."""
    rows = max(rows, 1.0)
    return ExpectedTokens(
        option.place.maker, rows, option.rate / (option.correction * rows), since, num_tokens
    )
