"""Measured draft gains of similar requests on one decode worker, by the worker that makes the drafts."""

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
    """The expected output of one of `rows` requests that had `num_tokens` at time `since`: `per_s` more
    tokens a second, before correction.
    """

    maker: DraftMaker
    rows: float
    per_s: float
    since: float
    num_tokens: int


class DraftKind:
    """Requests of one decode worker and class with the same settings. All draft with `maker` if that pays.

    `tried` is called with each trial that begins.
    """

    def __init__(self, tried: Callable[[DraftSite], None] = lambda where: None) -> None:
        self._tried = tried
        self.seen = SeenRates()
        self.trials = Trials()
        self.maker: DraftMaker | None = None

    def decide(self, facts: DraftFacts, prospects: Prospects) -> DraftDecision:
        """Decide where a request drafts, or where all of them draft for a trial that begins."""
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
        """Learn from a request that first answered at `answered_at` and has `num_tokens` now, in a batch of
        `rows`.

        Nothing is learned while requests come or go: one of 16 that was planned as the only one gains few
        tokens.
        """
        seconds = now - max(expected.since, answered_at)
        if seconds <= 0:
            return
        if load_of(rows) == load_of(expected.rows):
            tokens = num_tokens - expected.num_tokens
            self.seen.note(expected.maker, expected.rows, seconds, tokens, expected.per_s * seconds)
        self.trials.passed(seconds / expected.rows)


def expect(option: DraftOption, rows: float, since: float, num_tokens: int) -> ExpectedTokens:
    """Return the expected output of one of `rows` requests that draft as `option` says."""
    rows = max(rows, 1.0)
    return ExpectedTokens(
        option.place.maker, rows, option.rate / (option.correction * rows), since, num_tokens
    )
