"""How many tokens the requests of a method should draft so that a step commits the most in a second.

Slots of all requests are taken in the order of their chance of survival, as long as expected tokens over
expected seconds rises (DSpark, arXiv 2607.05147; vLLM's adaptive verification). Pure arithmetic.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from protocol.speculation import Source
from speculation.control.estimator import Estimator, MethodEstimate
from speculation.control.request import SpeculatingRequest


@dataclass(frozen=True, slots=True)
class Step:
    """Of so many sequences: tokens that it should commit, rows that it drafts, and seconds of drafting."""

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
    """Plans without and with drafts of these requests of one method, on top of what `step` has. The same if
    none of them can draft.
    """
    known = estimator.methods[method]
    width = known.shape.width
    chances = [_slot_chances(known, request) for request in requests]
    reading = np.array(
        [
            estimator.read_seconds(method, request.unread) / estimator.mean_output * (1 + width * sum(slots))
            for request, slots in zip(requests, chances, strict=True)
        ]
    )
    slots = sorted(
        (-chance, level, index) for index, all in enumerate(chances) for level, chance in enumerate(all, 1)
    )
    ranks, levels, indices = np.array([(0.0, 0, 0), *slots]).T
    indices = indices.astype(int)
    ends = np.arange(len(ranks))
    weight = known.acceptance.found * width
    drafted = step.drafted + weight * ends
    tokens = step.tokens - weight * np.cumsum(ranks)
    drafting = known.time.seconds(len(requests), np.maximum.accumulate(levels), width * ends)
    drafting[0] = 0.0
    drafting += step.drafting
    seconds = estimator.target.seconds(step.num_sequences, drafted) + drafting
    rates = tokens / (seconds + np.cumsum(np.where(levels == 1, reading[indices], 0.0)))

    def plan(end: int) -> Plan:
        granted = width * np.bincount(indices[1 : end + 1], minlength=len(requests))
        reached = Step(step.num_sequences, float(tokens[end]), float(drafted[end]), float(drafting[end]))
        return Plan(granted.tolist(), reached, float(seconds[end]), float(rates[end]))

    return plan(0), plan(1 + int(np.argmax(rates[1:])) if slots else 0)


def _slot_chances(known: MethodEstimate, request: SpeculatingRequest) -> list[float]:
    """The chance of each slot's tokens; for a tree the mean over those that it has."""
    survival, most = request.acceptance.survival(), known.shape.max_tokens
    if not known.shape.whole:
        return survival[: request.most]
    if request.most is not None and request.most < most:
        return []
    return [sum(survival) / max(known.acceptance.found * most, 1.0)]
