"""Workers and requests for the tests of placement."""

from __future__ import annotations

from typing import Any

from protocol.costs import StepCosts
from protocol.ids import PeerAddress
from protocol.roles import ROLES
from protocol.worker_to_router import Register, WorkerState
from router.placement import placement_policy
from router.placement.cluster import Cluster
from router.placement.interface import (
    Placement,
    PolicyState,
    Prediction,
    Refusal,
    RequestFacts,
    WorkerSnapshot,
)

COSTS = StepCosts(
    step_s=2e-3,
    row_s=1e-4,
    context_s=1e-7,
    token_s=1e-4,
    attention_s=1e-8,
    chunk_tokens=512,
    kv_bytes=8192,
)


def prefill(name: str, **load: Any) -> WorkerSnapshot:
    return WorkerSnapshot(name, ROLES["prefill"].tasks, **({"costs": COSTS} | load))


def decode(name: str, **load: Any) -> WorkerSnapshot:
    return WorkerSnapshot(name, ROLES["decode"].tasks, **({"costs": COSTS} | load))


def registration(
    worker_id: str = "w",
    incarnation: str = "i",
    role: str = "decode",
    state: WorkerState | None = None,
    **more: Any,
) -> Register:
    """Return the registration of a worker without an endpoint."""
    state = state or WorkerState(worker_id=worker_id, incarnation=incarnation, role=role)
    address = PeerAddress(worker_id=worker_id, incarnation=incarnation, control="tcp://x:1")
    usual: dict[str, Any] = {"model": "m", "max_model_len": 100, "vocab_size": 10, "eos_token_ids": [0]}
    return Register(address=address, role=role, state=state, **usual | more)


def facts(**changes: Any) -> RequestFacts:
    return RequestFacts(**({"num_tokens": 256, "output_tokens": 128} | changes))


def answer(
    policy: str, workers: list[WorkerSnapshot], request: RequestFacts | None = None, turn: int = 0
) -> Placement | Refusal:
    return placement_policy(policy).place(request or facts(), Cluster(workers), PolicyState(turn))[0]


def placed(
    policy: str, workers: list[WorkerSnapshot], request: RequestFacts | None = None, turn: int = 0
) -> Placement:
    found = answer(policy, workers, request, turn)
    assert isinstance(found, Placement)
    return found


def predicted(placement: Placement) -> Prediction:
    assert placement.predicted is not None
    return placement.predicted
