"""The latest placement decisions, and the accuracy of their predictions."""

from __future__ import annotations

from collections import deque

from router.observe.metrics import Metrics
from router.placement.decision import PlacementDecision, tpot_seconds
from router.placement.interface import Placement, RequestFacts
from router.requests.journal import LiveRequest

MAX_DECISIONS = 1000
"""Takes some hundred kilobytes."""


class DecisionLog:
    """The latest decisions. Runs on the event loop only."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._decisions: deque[PlacementDecision] = deque(maxlen=MAX_DECISIONS)

    def latest(self, count: int) -> list[PlacementDecision]:
        """Return up to `count` decisions, the newest first."""
        return list(self._decisions)[::-1][:count]

    def placed(self, request: LiveRequest, facts: RequestFacts, placement: Placement) -> None:
        request.decision = PlacementDecision(request.request_id, facts, placement, request.drafts)
        self._decisions.append(request.decision)

    def answered(self, request: LiveRequest, now: float) -> None:
        """Record that the placement's first token has come."""
        decision = request.decision
        if decision is not None:
            decision.observed_ttft_s = now - decision.placed_at
            if decision.placement.predicted is not None:
                predicted_s = decision.placement.predicted.ttft_s
                self._metrics.predicted("ttft", predicted_s, decision.observed_ttft_s)

    def finished(self, request: LiveRequest, now: float) -> None:
        decision = request.decision
        tokens = len(request.output_token_ids) - request.num_emitted_before - 1
        if decision is None or decision.observed_ttft_s is None or tokens < 1:
            return
        decision.observed_tpot_s = (now - decision.placed_at - decision.observed_ttft_s) / tokens
        if decision.placement.predicted is not None:
            predicted_s = tpot_seconds(decision.placement.predicted, decision.facts.output_tokens)
            self._metrics.predicted("tpot", predicted_s, decision.observed_tpot_s)
