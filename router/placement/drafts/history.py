"""A request's record of its drafts, for `/decisions`, logs and traces. No decision depends on it.

Each plan begins a period. The record has for each period where drafts were to be made, and its steps, tokens
and drafted tokens; for the latest plan also the options that were compared.
"""

from __future__ import annotations

from collections import deque
from typing import Any, NamedTuple

from router.placement.drafts.interface import DraftDecision, DraftOption, DraftPlace

MAX_PERIODS = 16
"""The most periods to keep, the latest ones: a long request may be planned again without limit."""


class DraftCounts(NamedTuple):
    """Totals of a request: its steps after the first token, and the tokens of these steps."""

    steps: int = 0
    tokens: int = 0
    drafted: int = 0
    accepted: int = 0


class DraftPeriod:
    """The time from one plan to the next. `began` and `ended` are the request's totals at these times; None:
    it goes on.
    """

    __slots__ = ("began", "decision", "ended", "worker_id")

    def __init__(self, decision: DraftDecision, worker_id: str, began: DraftCounts) -> None:
        self.decision, self.worker_id, self.began = decision, worker_id, began
        self.ended: DraftCounts | None = None

    @property
    def counts(self) -> DraftCounts:
        """The counts of this period alone; zeros until it has ended."""
        ended = self.ended or self.began
        return DraftCounts(*(end - begin for end, begin in zip(ended, self.began, strict=True)))

    def as_json(self) -> dict[str, Any]:
        counts, decision = self.counts, self.decision
        return {
            **_place(decision.place, self.worker_id),
            "predicted_tokens_per_step": decision.chosen.tokens_per_step,
            "steps": counts.steps,
            "tokens": counts.tokens,
            "drafted_tokens": counts.drafted,
            "accepted_tokens": counts.accepted,
        }

    def comparison(self) -> dict[str, Any]:
        """Return the prediction for each place."""
        return {
            "chosen": _option(self.decision.chosen, self.worker_id),
            "alternatives": [
                _option(option, self.worker_id)
                for option in self.decision.options
                if option.place != self.decision.place
            ],
            "reason": self.decision.reason,
        }


class DraftHistory:
    """The draft periods of one request, which was planned again `num_replans` times."""

    __slots__ = ("num_replans", "periods")

    def __init__(self) -> None:
        self.periods: deque[DraftPeriod] = deque(maxlen=MAX_PERIODS)
        self.num_replans = 0

    @property
    def current(self) -> DraftPeriod | None:
        """The current period; None before the first plan and after the last."""
        latest = self.periods[-1] if self.periods else None
        return latest if latest is not None and latest.ended is None else None

    @property
    def place(self) -> DraftPlace | None:
        current = self.current
        return current.decision.place if current is not None else None

    def begin_period(self, decision: DraftDecision, worker_id: str, counts: DraftCounts) -> None:
        """Begin a period on the decode worker `worker_id`."""
        self.periods.append(DraftPeriod(decision, worker_id, counts))

    def as_json(self) -> dict[str, Any] | None:
        """Return the record, or None if there was no plan: the deployment has no drafts, and the request
        asks for none.
        """
        if not self.periods:
            return None
        latest = self.periods[-1]
        return {"replans": self.num_replans, "periods": self.periods_as_json(), **latest.comparison()}

    def periods_as_json(self) -> list[dict[str, Any]]:
        return [period.as_json() for period in self.periods]

    def end_period(self, counts: DraftCounts) -> DraftPeriod | None:
        """End the current period, if there is one, and return it."""
        current = self.current
        if current is not None:
            current.ended = counts
        return current


def _option(option: DraftOption, worker_id: str) -> dict[str, Any]:
    return {
        **_place(option.place, worker_id),
        "predicted": {
            "tokens_per_s": option.rate,
            "tokens_per_s_with_catch_up": option.worth,
            "tokens_per_step": option.tokens_per_step,
            "seen_to_predicted": option.correction,
        },
    }


def _place(place: DraftPlace, worker_id: str) -> dict[str, Any]:
    by = place.at or worker_id
    return {
        "where": place.where,
        "worker": by if place.method is not None else None,
        "method": place.method,
        "max_tokens": place.max_tokens,
    }
