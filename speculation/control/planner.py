"""How many tokens the requests of a method should draft so that a step commits the most in a second.

Slots of all requests are taken in the order of their chance of survival, as long as expected tokens over
expected seconds rises (DSpark, arXiv 2607.05147; vLLM's adaptive verification). Pure arithmetic.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from protocol.speculation import Source
from speculation.account import Origin
from speculation.control.acceptance import RequestAcceptance


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
class SpeculatingRequest:
    """One request of the batch. Without a `method` it does not speculate; `fixed_tokens` None is "auto".
    It drafts `most` tokens at most, if that is not None.

    `place` is its number of tokens, `unread` those that the drafter must read before it drafts; `is_blind`:
    its prompt was not read, and can't be any more. It drafts `granted` tokens in each step of the present
    plan.
    """

    method: Source | None
    fixed_tokens: int | None
    acceptance: RequestAcceptance
    origin: Origin = "computed"
    place: int = 0
    unread: int = 0
    is_blind: bool = False
    granted: int = 0
    most: int | None = None


@dataclass(slots=True)
class StepCost:
    """Of a step so far: `tokens` committed, `rows` drafted, `drafting` seconds. `target` are the seconds of
    the rest by the number of drafted rows.
    """

    target: list[float]
    tokens: float
    rows: float = 0.0
    drafting: float = 0.0

    @property
    def most_rows(self) -> int:
        return len(self.target) - 1

    @property
    def seconds(self) -> float:
        return self.target_seconds(self.rows) + self.drafting

    @property
    def rate(self) -> float:
        """Tokens a second."""
        return self.tokens / self.seconds

    def target_seconds(self, rows: float) -> float:
        """With so many drafted rows on average, at most `most_rows`."""
        whole = int(rows)
        seconds = self.target[whole]
        if rows > whole:
            seconds += (rows - whole) * (self.target[whole + 1] - seconds)
        return seconds


@dataclass(frozen=True, slots=True)
class DraftCost:
    """Seconds of drafting: once for a batch, for each level and for each token. `reading` are those for each
    unread token, per token that a request will still generate.
    """

    start: float
    per_level: float
    per_token: float
    reading: float = 0.0


@dataclass(frozen=True, slots=True)
class Plan:
    """`granted[i]` tokens for request i, and the step that they lead to. `rate` counts reading too."""

    granted: list[int]
    step: StepCost
    rate: float


def best_plan(
    shape: Shape, cost: DraftCost, requests: Sequence[SpeculatingRequest], step: StepCost
) -> Plan | None:
    """The best plan that drafts for these requests of one method, on top of what `step` has; None if the
    largest step has no room.
    """
    chances = [slot_chances(shape, request) for request in requests]
    slots = [
        (-chance, level, index) for index, all in enumerate(chances) for level, chance in enumerate(all, 1)
    ]
    slots.sort()
    width = shape.width
    tokens, rows, drafting, reading = step.tokens, step.rows, step.drafting + cost.start, 0.0
    deepest = 0
    best_rate, best_end, best = 0.0, 0, None
    for end, (rank, level, index) in enumerate(slots, 1):
        weight = requests[index].acceptance.found * width
        tokens -= rank * weight
        rows += weight
        drafting += cost.per_token * width
        if level > deepest:
            deepest = level
            drafting += cost.per_level
        if level == 1 and requests[index].unread:
            reading += cost.reading * requests[index].unread * (1 + sum(chances[index]) * width)
        if rows > step.most_rows:
            break
        seconds = step.target_seconds(rows) + drafting
        if tokens > best_rate * (seconds + reading):
            best_rate, best_end = tokens / (seconds + reading), end
            best = StepCost(step.target, tokens, rows, drafting)
    if best is None:
        return None
    granted = [0] * len(requests)
    for _, _, index in slots[:best_end]:
        granted[index] += width
    return Plan(granted, best, best_rate)


def add_fixed(
    shape: Shape, cost: DraftCost, requests: Sequence[SpeculatingRequest], step: StepCost
) -> StepCost:
    """The step with the drafts of requests whose number is fixed."""
    tokens, rows = step.tokens, step.rows
    for request in requests:
        share = request.acceptance.found * shape.width
        tokens += share * sum(slot_chances(shape, request)[: request.granted])
        rows += request.acceptance.found * request.granted
    most = max(request.granted for request in requests)
    levels = 1 if shape.whole else most
    drafted = sum([request.granted for request in requests])
    drafting = step.drafting + cost.start + cost.per_level * levels + cost.per_token * drafted
    return StepCost(step.target, tokens, min(rows, step.most_rows), drafting)


def slot_chances(shape: Shape, request: SpeculatingRequest) -> list[float]:
    """The chance of each slot's tokens; for a tree the mean over those that it has."""
    survival = request.acceptance.survival()
    if not shape.whole:
        return survival[: request.most]
    if request.most is not None and request.most < shape.max_tokens:
        return []
    return [sum(survival) / max(request.acceptance.found * shape.max_tokens, 1.0)]
