"""Records of decisions: where a request was placed, and where its drafts were to be made.

A placement has the options compared, the expected cost and the observed times. Each draft plan begins a
period with its steps, tokens and drafted tokens; the latest plan also has the options compared.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from protocol.ids import PeerAddress
from protocol.requests import DraftPlan
from router.placement.drafts import DraftDecision, DraftOption, ExpectedTokens
from router.placement.interface import Option, Placement, RequestFacts


@dataclass(eq=False, slots=True)
class PlacementDecision:
    """A placement that was made. Observed seconds count from the placement; None: not known yet."""

    request_id: str
    facts: RequestFacts
    placement: Placement
    drafts: DraftHistory
    at: float = field(default_factory=time.time)
    placed_at: float = field(default_factory=time.monotonic)
    observed_ttft_s: float | None = None
    observed_tpot_s: float | None = None

    def as_json(self) -> dict[str, Any]:
        placement, facts = self.placement, self.facts
        return {
            "request_id": self.request_id,
            "at": self.at,
            "num_tokens": facts.num_tokens,
            "expected_output_tokens": facts.output_tokens,
            "cached_tokens": dict(facts.cached_tokens),
            "session": facts.session or None,
            "asked_to_split": facts.split,
            "chosen": _option(Option(placement.workers, placement.prefix, placement.predicted), facts),
            "missing": placement.missing,
            "alternatives": [
                _option(option, facts)
                for option in placement.options
                if (option.workers, option.prefix) != (placement.workers, placement.prefix)
            ],
            "drafts": self.drafts.as_json(),
            "observed": {"ttft_s": self.observed_ttft_s, "tpot_s": self.observed_tpot_s},
        }


def _option(option: Option, facts: RequestFacts) -> dict[str, Any]:
    shown: dict[str, Any] = {"workers": dict(option.workers), "prefix": option.prefix}
    if option.predicted is not None:
        shown["predicted"] = {
            "ttft_s": option.predicted.ttft_s,
            "tpot_s": option.predicted.tpot_s(facts.output_tokens),
            "cost_s": option.predicted.total_s,
            "parts": option.predicted._asdict(),
        }
    return shown


MAX_PERIODS = 16
"""Most periods to keep, the latest ones: the number of plans of a long request has no limit."""


class DraftCounts(NamedTuple):
    """Totals of a request: its steps after the first token, and the tokens that these steps brought."""

    steps: int = 0
    tokens: int = 0
    drafted: int = 0
    accepted: int = 0


@dataclass(eq=False, slots=True)
class DraftPeriod:
    """The time between two draft plans of a request on the decode worker `worker_id`.

    `began` and `ended` are the request's totals then; `ended` is None while the period lasts. A draft worker,
    if it drafts, reads `num_tokens` tokens first. `expected` is the output expected since the last sweep.
    """

    decision: DraftDecision
    worker_id: str
    at: PeerAddress | None
    num_tokens: int
    began: DraftCounts
    ended: DraftCounts | None = None
    expected: ExpectedTokens | None = None

    @property
    def counts(self) -> DraftCounts:
        """The counts of this period alone; zeros until the period has ended."""
        ended = self.ended or self.began
        return DraftCounts(*(end - begin for end, begin in zip(ended, self.began, strict=True)))

    @property
    def made_by(self) -> str | None:
        """The id of the worker that drafts for the request."""
        place = self.decision.place
        return (place.at or self.worker_id) if place.method is not None else None

    def as_json(self) -> dict[str, Any]:
        counts, decision = self.counts, self.decision
        return {
            **_place(decision.chosen, self.worker_id),
            "predicted_tokens_per_step": decision.chosen.tokens_per_step,
            "steps": counts.steps,
            "tokens": counts.tokens,
            "drafted_tokens": counts.drafted,
            "accepted_tokens": counts.accepted,
        }

    def comparison(self) -> dict[str, Any]:
        """Return the prediction for each place."""
        return {
            "chosen": _draft_option(self.decision.chosen, self.worker_id),
            "alternatives": [
                _draft_option(option, self.worker_id)
                for option in self.decision.options
                if option.place != self.decision.place
            ],
            "reason": self.decision.reason,
        }


@dataclass(eq=False, slots=True)
class DraftHistory:
    """The draft periods of one request, which was planned again `num_replans` times."""

    periods: deque[DraftPeriod] = field(default_factory=lambda: deque(maxlen=MAX_PERIODS))
    num_replans: int = 0

    @property
    def current(self) -> DraftPeriod | None:
        """The current period; None before the first plan and after the last."""
        latest = self.periods[-1] if self.periods else None
        return latest if latest is not None and latest.ended is None else None

    @property
    def plan(self) -> DraftPlan | None:
        """The draft plan to send to the decode worker; None: the worker decides by itself."""
        current = self.current
        if current is None:
            return None
        chosen = current.decision.chosen
        return DraftPlan(method=chosen.place.method, max_tokens=chosen.max_tokens, at=current.at)

    def as_json(self) -> dict[str, Any] | None:
        """Return the record; None if neither the deployment nor the request uses drafts."""
        if not self.periods:
            return None
        latest = self.periods[-1]
        return {"replans": self.num_replans, "periods": self.periods_as_json(), **latest.comparison()}

    def periods_as_json(self) -> list[dict[str, Any]]:
        return [period.as_json() for period in self.periods]


def _draft_option(option: DraftOption, worker_id: str) -> dict[str, Any]:
    return {
        **_place(option, worker_id),
        "predicted": {
            "tokens_per_s": option.rate,
            "tokens_per_s_with_catch_up": option.worth,
            "tokens_per_step": option.tokens_per_step,
            "seen_to_predicted": option.correction,
        },
    }


def _place(option: DraftOption, worker_id: str) -> dict[str, Any]:
    place = option.place
    return {
        "where": place.where,
        "worker": (place.at or worker_id) if place.method is not None else None,
        "method": place.method,
        "max_tokens": option.max_tokens,
    }
