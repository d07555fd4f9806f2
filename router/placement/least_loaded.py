"""Least loaded: the fewest prompt tokens ahead for prefill, the fewest requests for decode."""

from __future__ import annotations

from collections.abc import Sequence

from protocol.roles import Task
from router.placement.interface import Placement, Refusal, RequestFacts, WorkerSnapshot

MIN_FETCHED_TOKENS = 256
"""So many more tokens must another worker have cached before its blocks are worth fetching."""


def least_loaded(request: RequestFacts, workers: Sequence[WorkerSnapshot]) -> Placement | Refusal:
    """A prefill worker that already holds the prompt is taken whatever its load.

    A prefix that only another worker holds is fetched from there.
    """
    prefills = [worker for worker in workers if worker.purpose == "prefill"]
    decodes = [worker for worker in workers if worker.purpose == "decode"]
    holders = [worker for worker in prefills if worker.worker_id == request.prefix_at]
    prefill = min(holders or prefills, key=_prefill_load, default=None)
    decode = min(decodes, key=_decode_load, default=None)
    names: dict[Task, str]
    missing: Task | None = None
    if prefill is not None and decode is not None and request.disaggregate:
        first, names = prefill, {"prefill": prefill.worker_id, "decode": decode.worker_id}
    elif decode is not None:
        first, names = decode, {"decode": decode.worker_id}
        missing = "prefill" if request.disaggregate else None
    elif prefill is not None and "decode" in prefill.tasks:
        first, names, missing = prefill, {"decode": prefill.worker_id}, "decode"
    else:
        return Refusal("no worker is ready")
    return Placement(names, missing, _better_holder(request, first, workers))


def _better_holder(
    request: RequestFacts, first: WorkerSnapshot, workers: Sequence[WorkerSnapshot]
) -> str | None:
    """A worker with much more of the prompt in its cache than the one that begins."""
    cached = request.cached_tokens
    best = max(workers, key=lambda worker: cached.get(worker.worker_id, 0))
    more = cached.get(best.worker_id, 0) - cached.get(first.worker_id, 0)
    return best.worker_id if more >= MIN_FETCHED_TOKENS else None


def _prefill_load(worker: WorkerSnapshot) -> tuple[float, float, float, str]:
    return worker.prefill_tokens, worker.requests, worker.kv_usage, worker.worker_id


def _decode_load(worker: WorkerSnapshot) -> tuple[float, float, str]:
    return worker.requests, worker.kv_usage, worker.worker_id
