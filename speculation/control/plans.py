"""Compares steps with and without drafts of one method, by expected tokens and expected seconds.

What drafts will bring is read off the latest ones: the survival of each of their tokens, by the drafter's
confidence in it. Without confidences all drafts are expected to fare alike, by position.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from costs.widths import TargetTime
from speculation.control.estimator import MethodEstimate

_NUM_FLOORS = 12
_QUANTILES = np.linspace(0, 1, _NUM_FLOORS)
"""Floors to choose from, as quantiles of the survival of the latest tokens."""


@dataclass(frozen=True, slots=True)
class Load:
    """A step of so many sequences. It is expected to bring `tokens` and has `rows` drafted ones, which took
    `drafting` seconds.
    """

    num_sequences: int
    tokens: float
    rows: float = 0.0
    drafting: float = 0.0


@dataclass(frozen=True, slots=True)
class Plan:
    """A step as planned, its seconds and its tokens a second.

    A draft has up to `depth` tokens. It ends with a token whose survival is below `floor`.
    """

    load: Load
    seconds: float
    rate: float
    depth: int = 0
    floor: float = 0.0


def plain_and_best(
    target: TargetTime, known: MethodEstimate, num_requests: int, load: Load
) -> tuple[Plan, Plan]:
    """Return plans without and with drafts of so many requests, in addition to what the step has anyway.

    A token is drafted while expected tokens over expected seconds rise (DSpark, arXiv 2607.05147; vLLM's
    adaptive verification).
    """
    survival, shape, is_judged = known.survival(), known.shape, known.latest.are_known
    if shape.whole:
        floors = np.zeros(1)
        rows, tokens, levels = np.full(1, float(shape.max_tokens)), survival.sum(keepdims=True)[0], np.ones(1)
        drafted = rows
    else:
        ordered = np.append(np.sort(survival[survival > 0])[::-1], 0.0)  # if there are none
        places = (max(len(ordered) - 2, 0) * _QUANTILES).astype(np.intp)
        floors = ordered[places]
        rows, tokens = (places + 1) / len(survival), ordered.cumsum()[places] / len(survival)
        reach = (survival >= floors[:, None, None]).mean(1)  # the share of drafts that have each position
        if is_judged:  # and the token that ends a draft
            reach = np.column_stack((np.ones(_NUM_FLOORS), reach[:, :-1]))
        drafted, levels = reach.sum(1), (1 - (1 - reach) ** num_requests).sum(1)
    num_found = num_requests * known.acceptance.found
    verified = load.rows + num_found * np.append(0.0, rows)
    committed = load.tokens + num_found * np.append(0.0, tokens)
    drafting = known.time.unit(num_requests) * known.time.units(levels, num_requests * drafted)
    drafting = load.drafting + np.append(0.0, drafting)
    seconds = target.seconds(load.num_sequences, verified) + drafting
    rates = committed / seconds

    def plan(index: int) -> Plan:
        reached = Load(load.num_sequences, *(float(each[index]) for each in (committed, verified, drafting)))
        depth = 0 if not index else survival.shape[1] if is_judged else round(float(drafted[index - 1]))
        floor = float(floors[index - 1]) if index else 0.0
        return Plan(reached, float(seconds[index]), float(rates[index]), depth, floor)

    return plan(0), plan(1 + int(rates[1:].argmax()))


def worth_verifying(survival: np.ndarray, prices: np.ndarray) -> list[int]:
    """Return how many tokens of each draft, [drafts, positions], bring more than their prices."""
    ordered = np.sort(survival, axis=None)[::-1][: len(prices) - 1]
    gains = ordered.cumsum() - (prices[1 : len(ordered) + 1] - prices[0])
    most = int(gains.argmax())
    least = ordered[most] if gains[most] > 0 else np.inf
    counts: list[int] = (survival >= least).sum(1).tolist()
    return counts
