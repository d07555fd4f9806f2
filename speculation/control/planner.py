"""Chooses how many tokens the requests of a method draft, so that a step commits the most in a second.

Slots of all requests are taken in the order of their chance of survival, as long as expected tokens over
expected seconds rises (DSpark, arXiv 2607.05147; vLLM's adaptive verification). Pure arithmetic.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from protocol.speculation import Source
from speculation.control.estimator import Estimator, MethodEstimate
from speculation.control.request import SpeculatingRequest


@dataclass(frozen=True, slots=True)
class Step:
    """A step of so many sequences: tokens that it should commit, rows that it drafts, seconds of drafting."""

    num_sequences: int
    tokens: float
    drafted: float = 0.0
    drafting: float = 0.0


@dataclass(frozen=True, slots=True)
class Plan:
    """`granted[i]` tokens for request i, and the step that they lead to. `rate` are tokens a second."""

    granted: list[int]
    step: Step
    seconds: float
    rate: float


def plain_and_best(
    estimator: Estimator, method: Source, requests: Sequence[SpeculatingRequest], step: Step
) -> tuple[Plan, Plan]:
    """Return plans without and with drafts of these requests of one method, in addition to those of `step`.
    They are the same if none of the requests can draft.
    """
    known = estimator.methods[method]
    width, weight = known.shape.width, known.acceptance.found * known.shape.width
    chances = [_slot_chances(known, request) for request in requests]
    slots = sorted(
        (-chance, level, index) for index, all in enumerate(chances) for level, chance in enumerate(all, 1)
    )
    tokens, drafted, drafting, reading = [step.tokens], [step.drafted], [step.drafting], [0.0]
    read_share = estimator.read_seconds(method, 1) / estimator.mean_output
    unit, deepest = known.time.unit(len(requests)), 0
    for end, (rank, level, index) in enumerate(slots, 1):
        deepest = max(deepest, level)
        tokens.append(tokens[-1] - rank * weight)
        drafted.append(drafted[-1] + weight)
        drafting.append(step.drafting + unit * known.time.units(deepest, end * width))
        unread = requests[index].unread if level == 1 else 0
        reading.append(reading[-1] + read_share * unread * (1 + sum(chances[index]) * width))
    seconds = estimator.target.seconds(step.num_sequences, drafted) + drafting
    rates = tokens / (seconds + reading)

    def plan(end: int) -> Plan:
        granted = [0] * len(requests)
        for _, _, index in slots[:end]:
            granted[index] += width
        reached = Step(step.num_sequences, tokens[end], drafted[end], drafting[end])
        return Plan(granted, reached, float(seconds[end]), float(rates[end]))

    return plan(0), plan(1 + int(rates[1:].argmax()) if slots else 0)


def _slot_chances(known: MethodEstimate, request: SpeculatingRequest) -> list[float]:
    """Return the chance of each slot's tokens; for a tree the mean over its tokens."""
    survival, most = request.acceptance.survival(), known.shape.max_tokens
    if not known.shape.whole:
        return survival[: request.most]
    if request.most is not None and request.most < most:
        return []
    return [sum(survival) / max(known.acceptance.found * most, 1.0)]
