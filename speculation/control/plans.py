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
"""Floors to choose from."""


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
    num_drafts, positions = survival.shape
    if shape.whole:
        floors = np.zeros(1)
        lengths = np.full((1, num_drafts), shape.max_tokens)
        rows, tokens, levels = np.full(1, float(shape.max_tokens)), survival.sum(keepdims=True)[0], np.ones(1)
    else:
        ordered = np.append(np.sort(survival[survival > 0])[::-1], 1.0)  # there may be none
        floors = ordered[np.linspace(0, max(len(ordered) - 2, 0), _NUM_FLOORS).astype(np.intp)]
        kept = survival >= floors[:, None, None]
        lengths = kept.sum(2)
        rows, tokens = lengths.mean(1), (survival * kept).sum((1, 2)) / num_drafts
        if is_judged:
            lengths = np.minimum(lengths + 1, positions)  # with the token that ends a draft
        reach = (lengths[:, :, None] > np.arange(positions)).mean(1)
        levels = (1 - (1 - reach) ** num_requests).sum(1)
    num_found = num_requests * known.acceptance.found
    verified = load.rows + num_found * np.append(0.0, rows)
    committed = load.tokens + num_found * np.append(0.0, tokens)
    drafting = known.time.unit(num_requests) * known.time.units(levels, num_requests * lengths.mean(1))
    drafting = load.drafting + np.append(0.0, drafting)
    seconds = target.seconds(load.num_sequences, verified) + drafting
    rates = committed / seconds

    def plan(index: int) -> Plan:
        reached = Load(load.num_sequences, *(float(each[index]) for each in (committed, verified, drafting)))
        depth = 0 if not index else positions if is_judged else int(lengths[index - 1, 0])
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
