"""Least loaded: the fewest prompt tokens ahead for prefill, the fewest requests for decode."""

from __future__ import annotations

from collections.abc import Sequence

from router.placement.interface import Decision, Refusal, RequestFacts, WorkerSnapshot


def least_loaded(request: RequestFacts, workers: Sequence[WorkerSnapshot]) -> Decision | Refusal:
    """The predicted cost is the prompt tokens to compute up to this request's first token."""
    ready = [worker for worker in workers if worker.lifecycle == "ready"]
    prefill = min((w for w in ready if w.role == "prefill"), key=_prefill_load, default=None)
    decode = min((w for w in ready if w.role == "decode"), key=_decode_load, default=None)
    if decode is not None and (prefill is None or not request.disaggregate):
        why = "no live prefill worker" if request.disaggregate else "disaggregation is off"
        return _alone(request, decode, why)
    if prefill is None:
        return Refusal("no worker is ready")
    if decode is None:
        return _alone(request, prefill, "no live decode worker")
    return Decision(
        prefill=prefill.worker_id,
        decode=decode.worker_id,
        predicted_cost=prefill.prefill_tokens + request.num_prompt_tokens,
        reasons=(
            f"{prefill.worker_id} has {prefill.prefill_tokens} prompt tokens ahead",
            f"{decode.worker_id} has {decode.requests} requests",
        ),
    )


def _alone(request: RequestFacts, worker: WorkerSnapshot, why: str) -> Decision:
    return Decision(
        prefill=None,
        decode=worker.worker_id,
        predicted_cost=worker.prefill_tokens + request.num_prompt_tokens,
        reasons=(why, f"{worker.worker_id} has {worker.requests} requests"),
    )


def _prefill_load(worker: WorkerSnapshot) -> tuple[float, float, float, str]:
    return worker.prefill_tokens, worker.requests, worker.kv_usage, worker.worker_id


def _decode_load(worker: WorkerSnapshot) -> tuple[float, float, str]:
    return worker.requests, worker.kv_usage, worker.worker_id
