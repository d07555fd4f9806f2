"""Predicts whether a placement meets its request's SLO, and when one will if it does not.

An idle worker accepts every request, so a wrong prediction is corrected by requests that run.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from router.placement.cluster import Cluster
from router.placement.interface import (
    Missed,
    Option,
    Placement,
    Prediction,
    Refusal,
    RequestFacts,
    WorkerSnapshot,
)
from router.placement.predict import prefill_cost

MAX_RETRY_S = 3600.0


class Miss(NamedTuple):
    """A predicted miss. `worker` is idle in `idle_in_s` seconds; then the request takes `alone_s`."""

    missed: Missed
    worker: WorkerSnapshot
    expected_s: float
    asked_s: float
    alone_s: float
    idle_in_s: float

    @property
    def retry_after_s(self) -> float:
        """When to retry: the expected time is assumed to fall evenly until the worker is idle."""
        spread_s = self.expected_s - self.alone_s
        share = min((self.expected_s - self.asked_s) / spread_s, 1.0) if spread_s > 0 else 1.0
        seconds = share * self.idle_in_s
        return min(seconds, MAX_RETRY_S) if seconds >= 0 else 1.0


def refusal(request: RequestFacts, cluster: Cluster, placement: Placement) -> Refusal | None:
    """Return why the request must be refused, or None if it need not be."""
    found = miss(request, cluster, placement)
    if found is None or found.worker.requests <= 0:
        return None
    name = "first token" if found.missed == "slo_ttft" else "time per output token"
    reason = f"the {name} is expected to take {found.expected_s:.3g} s, the SLO is {found.asked_s:.3g} s"
    in_vain = found.alone_s > found.asked_s
    if in_vain:
        reason += f"; a worker with nothing else to do would need {found.alone_s:.3g} s"
    return Refusal(reason, found.missed, waiting_helps=not in_vain, retry_after_s=found.retry_after_s)


def miss(request: RequestFacts, cluster: Cluster, option: Option | Placement) -> Miss | None:
    """Return the part of the SLO that the request is expected to miss, if any."""
    predicted = option.predicted
    first = cluster.get(next(iter(option.workers.values())))
    decode = cluster.get(option.workers["decode"])
    if predicted is None or first is None or decode is None:
        return None
    ttft_s = request.waited_s + predicted.ttft_s
    if ttft_s > request.slo_ttft_s:
        idle = replace(first, rows=0, context_tokens=0, prefill_tokens=0, prompts=0)
        alone_s = prefill_cost(request, idle, None).prefill_s
        return Miss("slo_ttft", first, ttft_s, request.slo_ttft_s, alone_s, ttft_s - alone_s)
    tpot_s = _tpot_s(request, predicted, decode)
    if tpot_s > request.slo_tpot_s:
        costs = decode.costs_now
        alone_s = costs.decode_s(1, request.num_tokens) / max(costs.tokens_per_row, 1.0)
        return Miss("slo_tpot", decode, tpot_s, request.slo_tpot_s, alone_s, predicted.decode_s)
    return None


def _tpot_s(request: RequestFacts, predicted: Prediction, decode: WorkerSnapshot) -> float:
    """Predict the time per output token when the prefill has ended, not now.

    A request that waits W seconds and then decodes for D spends D / (W + D) of its time decoding. That share
    of the requests assigned to the worker decodes at once.
    """
    tpot_s = predicted.tpot_s(request.output_tokens)
    if predicted.decode_s <= 0:
        return tpot_s
    costs, share = decode.costs_now, predicted.decode_s / (predicted.ttft_s + predicted.decode_s)
    fewer_s = (1 - share) * (costs.row_s * decode.rows + costs.context_s * decode.context_tokens)
    return tpot_s - fewer_s / max(costs.tokens_per_row, 1.0)
