"""How many tokens each of a method's requests should draft so that a step commits the most in a second.

Slots of all requests are taken in the order of their survival probability, as long as expected tokens over
expected seconds rises (DSpark, arXiv 2607.05147; vLLM's adaptive verification). That is done for each depth
of the deepest chain on its own, since a sequential drafter is paid for by depth. Pure arithmetic.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Many
from dataclasses import dataclass
from typing import NamedTuple

from protocol.speculation import Method
from speculation.control.acceptance import Acceptance
from speculation.control.collapse import Origin
from speculation.control.step_time import DraftTimes

CAUTION = 0.95
"""What an expected token counts for, since the estimates are not exact."""
_HORIZON = 64
"""Drafts over which it must pay to read what the drafter has missed of a request."""


@dataclass(frozen=True, slots=True)
class Shape:
    """What a method can draft: chains of up to `max_tokens`; `whole`: so many tokens or none."""

    max_tokens: int
    whole: bool = False

    @property
    def width(self) -> int:
        """Tokens of a slot."""
        return self.max_tokens if self.whole else 1


@dataclass(slots=True, eq=False)
class Request:
    """How one request speculates: with a method (None: not at all), for `fixed_tokens` or as many as pay.

    `place` is the number of its tokens, `backlog` that of those which the drafter must read before it can
    draft. `chosen` is the number of tokens for the coming step, `last_drafted` the choice by which it last
    was not 0, `num_first` how many of its drafts were made to learn about the method, `next_first` the place
    from which on it may make the next of them.
    """

    method: Method | None
    fixed_tokens: int | None
    acceptance: Acceptance
    origin: Origin = "computed"
    place: int = 0
    backlog: int = 0
    chosen: int = 0
    last_drafted: int = 0
    num_first: int = 0
    next_first: int = 0


@dataclass(slots=True)
class Load:
    """What a step will do: `tokens` committed, `rows` drafted, and `seconds` beside the target's own.

    `target` are those by the number of drafted rows. `drafting` are the seconds that the first draft of all
    brings along, beside its own; 0 once they count among `seconds`.
    """

    target: list[float]
    tokens: float
    rows: float
    seconds: float
    drafting: float = 0.0

    @property
    def most_rows(self) -> int:
        return len(self.target) - 1

    def target_seconds(self, rows: float) -> float:
        """For so many drafted rows on average, at most `most_rows`."""
        whole = int(rows)
        seconds = self.target[whole]
        if rows > whole:
            seconds += (rows - whole) * (self.target[whole + 1] - seconds)
        return seconds

    def total_seconds(self) -> float:
        return self.target_seconds(self.rows) + self.seconds

    def row_seconds(self) -> float:
        """The least that drafted rows cost on average, however many there are."""
        plain, *more = self.target
        return min([(seconds - plain) / rows for rows, seconds in enumerate(more, 1)], default=math.inf)


class Plan(NamedTuple):
    """The first `end` slots, but for those deeper than `levels`, and what the step then commits and takes."""

    tokens: float
    seconds: float
    levels: int = 0
    end: int = 0

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


class Planner:
    """For the requests of one method that draft as many tokens as pay, beside a step's load so far.

    `plain` is what the step does without them.
    """

    def __init__(self, shape: Shape, times: DraftTimes, requests: Many[Request], load: Load) -> None:
        self._shape = shape
        self._times = times
        self._requests = requests
        self._load = load
        self.plain = Plan(load.tokens, load.total_seconds())
        self._slots = self._sorted_slots()

    def _sorted_slots(self) -> list[tuple[float, int, int]]:
        """Those that may pay for their rows, the likeliest first: (minus the chance, level, request)."""
        least = self._load.row_seconds() * self.plain.rate / CAUTION
        slots = []
        for index, request in enumerate(self._requests):
            for level, likely in enumerate(chances(self._shape, request.acceptance), 1):
                if likely < least:
                    break
                slots.append((-likely, level, index))
        slots.sort()
        return slots

    def best(self) -> Plan:
        """The best plan that drafts, by depth up to where they stop to get better. Without slots there is
        none, and nothing is drafted.
        """
        best = Plan(0.0, math.inf)
        deepest = max([level for _, level, _ in self._slots], default=0)
        for levels in range(1, deepest + 1) if self._times.per_level else (deepest,):
            plan = self._best_prefix(levels)
            if plan.rate <= best.rate:
                break
            best = plan
        return best

    def _best_prefix(self, levels: int) -> Plan:
        tokens, rows = self._load.tokens, self._load.rows
        seconds = self._load.seconds + self._load.drafting
        seconds += self._times.start + self._times.per_level * levels
        per_token, width = self._times.per_token, self._shape.width
        weights = [request.acceptance.share * width for request in self._requests]
        best_rate, best = 0.0, Plan(0.0, math.inf)
        for end, (rank, level, index) in enumerate(self._slots, 1):
            if level > levels:
                continue
            weight = weights[index]
            tokens -= CAUTION * rank * weight
            rows += weight
            seconds += per_token * width
            if level == 1:
                seconds += self._times.per_read * self._requests[index].backlog / _HORIZON
            if rows > self._load.most_rows:
                break
            total = self._load.target_seconds(rows) + seconds
            if tokens > best_rate * total:
                best_rate, best = tokens / total, Plan(tokens, total, levels, end)
        return best

    def unread_seconds(self, plan: Plan) -> float:
        """For what the drafter must read before the plan's drafts: all of it, if they are the only ones."""
        drafting = [index for _, level, index in self._slots[: plan.end] if level == 1]
        return self._times.per_read * sum([self._requests[index].backlog for index in drafting])

    def carry_out(self, plan: Plan) -> None:
        """Set `chosen` of the plan's requests, and add what they draft to the load."""
        load, times, width = self._load, self._times, self._shape.width
        load.seconds += load.drafting + times.start + times.per_level * plan.levels
        load.drafting = 0.0
        for rank, level, index in self._slots[: plan.end]:
            if level > plan.levels:
                continue
            request = self._requests[index]
            request.chosen += width
            weight = request.acceptance.share * width
            load.tokens -= CAUTION * rank * weight
            load.rows += weight
            load.seconds += times.per_token * width
            if level == 1:
                load.seconds += times.per_read * request.backlog


def chances(shape: Shape, acceptance: Acceptance) -> list[float]:
    """How likely the tokens of each slot are to be accepted; those that a tree really has, on average."""
    survival = acceptance.survival()
    if not shape.whole:
        return survival
    return [sum(survival) / max(acceptance.share * shape.max_tokens, 1.0)]


def probe(shape: Shape, times: DraftTimes, request: Request, levels: int, load: Load) -> tuple[int, float]:
    """For a request that drafts nothing while others draft `levels` deep: the number of tokens for which
    drafting would lose the least, and the seconds that it would lose.
    """
    best, least = 0, math.inf
    rows, before = load.rows, load.total_seconds()
    width, share = shape.width, request.acceptance.share
    seconds_per_token = before / load.tokens
    lost = load.seconds + load.drafting - before + times.per_read * request.backlog
    lost += 0.0 if levels else times.start
    for level, likely in enumerate(chances(shape, request.acceptance), 1):
        rows += share * width
        lost += times.per_token * width - likely * share * width * seconds_per_token
        if level > levels:
            lost += times.per_level
        if rows > load.most_rows or load.target_seconds(rows) + lost >= least:
            break
        best, least = level * width, load.target_seconds(rows) + lost
    return best, least
