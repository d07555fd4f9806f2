"""Least loaded: the fewest prompt tokens ahead for prefill, the fewest requests for decode."""

from __future__ import annotations

from collections.abc import Sequence

from protocol.messages import Role
from router.placement.interface import Decision, Refusal, RequestFacts, WorkerSnapshot

MIN_FETCHED_TOKENS = 256
"""So many more tokens must another worker have before its blocks are worth the trip."""


def least_loaded(request: RequestFacts, workers: Sequence[WorkerSnapshot]) -> Decision | Refusal:
    """The predicted cost is the prompt tokens to compute up to this request's first token.

    A prefill worker that holds the prompt already is taken whatever its load. A prefix that only another
    worker holds is fetched from there.
    """
    ready = [worker for worker in workers if worker.lifecycle == "ready"]
    prefills = [worker for worker in ready if worker.role == "prefill"]
    holders = [worker for worker in prefills if worker.worker_id == request.prefix_at]
    prefill = min(holders or prefills, key=_prefill_load, default=None)
    decode = min((w for w in ready if w.role == "decode"), key=_decode_load, default=None)
    first = prefill if prefill is not None and request.disaggregate else decode
    prefix = _better_holder(request, first, workers) if first is not None else None
    if decode is not None and not request.disaggregate:
        return _alone(request, decode, "disaggregation is off", prefix)
    if decode is not None and prefill is None:
        return _alone(request, decode, "no live prefill worker", prefix, missing_role="prefill")
    if prefill is None:
        return Refusal("no worker is ready")
    if decode is None:
        return _alone(request, prefill, "no live decode worker", prefix, missing_role="decode")
    return Decision(
        prefill=prefill.worker_id,
        decode=decode.worker_id,
        predicted_cost=prefill.prefill_tokens + request.num_prompt_tokens,
        reasons=(
            f"{prefill.worker_id} has {prefill.prefill_tokens} prompt tokens ahead",
            f"{decode.worker_id} has {decode.requests} requests",
        ),
        prefix=prefix,
    )


def _better_holder(
    request: RequestFacts, first: WorkerSnapshot, workers: Sequence[WorkerSnapshot]
) -> str | None:
    """A worker with much more of the prompt in its cache than the one that begins."""
    cached = request.cached_tokens
    best = max(workers, key=lambda worker: cached.get(worker.worker_id, 0))
    more = cached.get(best.worker_id, 0) - cached.get(first.worker_id, 0)
    return best.worker_id if more >= MIN_FETCHED_TOKENS else None


def _alone(
    request: RequestFacts,
    worker: WorkerSnapshot,
    why: str,
    prefix: str | None,
    missing_role: Role | None = None,
) -> Decision:
    return Decision(
        prefill=None,
        decode=worker.worker_id,
        predicted_cost=worker.prefill_tokens + request.num_prompt_tokens,
        reasons=(why, f"{worker.worker_id} has {worker.requests} requests"),
        missing_role=missing_role,
        prefix=prefix,
    )


def _prefill_load(worker: WorkerSnapshot) -> tuple[float, float, float, str]:
    return worker.prefill_tokens, worker.requests, worker.kv_usage, worker.worker_id


def _decode_load(worker: WorkerSnapshot) -> tuple[float, float, str]:
    return worker.requests, worker.kv_usage, worker.worker_id
