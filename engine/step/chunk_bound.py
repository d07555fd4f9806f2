"""How many tokens of prompts a step may compute beside sequences that decode, so that these do not stall."""

from __future__ import annotations

from collections.abc import Callable
from math import inf

from protocol.costs import StepCosts, itl_bound


class ChunkBound:
    """Without a budget (0), or with nothing to decode, there is no bound. `least_tokens` of a prompt always
    fit beside what decodes.
    """

    def __init__(self, costs: Callable[[], StepCosts], itl_budget_s: float, least_tokens: int) -> None:
        self._costs, self._budget_s, self._least = costs, itl_budget_s, least_tokens
        self._left_s: float | None = None

    def begin(self, rows: int, context: int, slo_tpot_s: float = inf) -> None:
        """A step that decodes so many sequences, which attend to `context` tokens in all. The strictest of
        their clients asks for `slo_tpot_s`.
        """
        if not rows or not self._budget_s:
            self._left_s = None
            return
        budget_s = itl_bound(self._budget_s, slo_tpot_s)
        self._left_s = self._costs().chunk_seconds(rows, context, budget_s)

    def tokens(self, wanted: int, before: int) -> int:
        """So many of the `wanted` tokens of a prompt, after `before` others, still fit; 0 if none do."""
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
