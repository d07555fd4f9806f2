"""Least loaded: the fewest prompt tokens ahead for prefill, the fewest requests for decode."""

from __future__ import annotations

from collections.abc import Sequence

from protocol.messages import Role
from router.placement.interface import Decision, Refusal, RequestFacts, WorkerSnapshot


def least_loaded(request: RequestFacts, workers: Sequence[WorkerSnapshot]) -> Decision | Refusal:
    """The predicted cost is the prompt tokens to compute up to this request's first token.

    A prefill worker that holds the prompt already is taken whatever its load.
    """
    ready = [worker for worker in workers if worker.lifecycle == "ready"]
    prefills = [worker for worker in ready if worker.role == "prefill"]
    holders = [worker for worker in prefills if worker.worker_id == request.prefix_at]
    prefill = min(holders or prefills, key=_prefill_load, default=None)
    decode = min((w for w in ready if w.role == "decode"), key=_decode_load, default=None)
    if decode is not None and not request.disaggregate:
        return _alone(request, decode, "disaggregation is off")
    if decode is not None and prefill is None:
        return _alone(request, decode, "no live prefill worker", missing_role="prefill")
    if prefill is None:
        return Refusal("no worker is ready")
    if decode is None:
        return _alone(request, prefill, "no live decode worker", missing_role="decode")
    return Decision(
        prefill=prefill.worker_id,
        decode=decode.worker_id,
        predicted_cost=prefill.prefill_tokens + request.num_prompt_tokens,
        reasons=(
            f"{prefill.worker_id} has {prefill.prefill_tokens} prompt tokens ahead",
            f"{decode.worker_id} has {decode.requests} requests",
        ),
    )


def _alone(
    request: RequestFacts, worker: WorkerSnapshot, why: str, missing_role: Role | None = None
) -> Decision:
    return Decision(
        prefill=None,
        decode=worker.worker_id,
        predicted_cost=worker.prefill_tokens + request.num_prompt_tokens,
        reasons=(why, f"{worker.worker_id} has {worker.requests} requests"),
        missing_role=missing_role,
    )


def _prefill_load(worker: WorkerSnapshot) -> tuple[float, float, float, str]:
    return worker.prefill_tokens, worker.requests, worker.kv_usage, worker.worker_id


def _decode_load(worker: WorkerSnapshot) -> tuple[float, float, str]:
    return worker.requests, worker.kv_usage, worker.worker_id
