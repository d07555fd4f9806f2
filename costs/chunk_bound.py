"""Bounds the prompt tokens of a step that also decodes, so that the decoding sequences do not stall."""

from __future__ import annotations

from collections.abc import Callable
from math import inf

from protocol.costs import StepCosts, itl_bound


class ChunkBound:
    """The bound of one step after the other. Without a budget (0), or with nothing to decode, there is none.
    `least_tokens` of a prompt always fit.
    """

    def __init__(self, costs: Callable[[], StepCosts], itl_budget_s: float, least_tokens: int) -> None:
        self._costs, self._budget_s, self._least = costs, itl_budget_s, least_tokens
        self._left_s: float | None = None

    def begin(self, rows: int, context: int, slo_tpot_s: float = inf) -> None:
        """Begin a step that decodes so many sequences, which attend to `context` tokens in all. The strictest
        of their clients asks for `slo_tpot_s`.
        """
        if not rows or not self._budget_s:
            self._left_s = None
            return
        budget_s = itl_bound(self._budget_s, slo_tpot_s)
        self._left_s = self._costs().chunk_seconds(rows, context, budget_s)

    def tokens(self, wanted: int, before: int) -> int:
        """Return how many of the `wanted` tokens of a prompt, after `before` others, still fit."""
        if self._left_s is None:
            return wanted
        if self._left_s <= 0:
            return 0
        costs = self._costs()
        count = min(wanted, max(costs.fitting_tokens(self._left_s, before), self._least))
        self._left_s = self._left_s - costs.chunks_s(count, before, count) if count == wanted else 0.0
        return count

    @property
    def is_full(self) -> bool:
        return self._left_s is not None and self._left_s <= 0
