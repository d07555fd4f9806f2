"""A bound on the prompt tokens of a step that also decodes, so that the decoding sequences do not stall."""

from __future__ import annotations

from collections.abc import Callable
from math import inf

from protocol.costs import StepCosts, itl_bound


class ChunkBound:
    """The bound of each step in turn. It does not apply without an ITL budget (0) or without decoding
    sequences. `least_tokens` of a prompt always fit.
    """

    def __init__(self, costs: Callable[[], StepCosts], itl_budget_s: float, least_tokens: int) -> None:
        self._costs, self._budget_s, self._least = costs, itl_budget_s, least_tokens
        self._left_s: float | None = None

    def begin(self, rows: int, context: int, slo_tpot_s: float = inf) -> None:
        """Begin a step that decodes `rows` sequences, which attend to `context` tokens in all. `slo_tpot_s`
        is the strictest time per output token that their clients ask for.
        """
        if not rows or not self._budget_s:
            self._left_s = None
            return
        budget_s = itl_bound(self._budget_s, slo_tpot_s)
        self._left_s = self._costs().chunk_seconds(rows, context, budget_s)

    def tokens(self, wanted: int, before: int) -> int:
        """Return how many of a prompt's `wanted` tokens, which follow `before` computed ones, still fit."""
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
