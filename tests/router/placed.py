"""Workers with known costs, and requests, for tests of placement and of draft placement."""

from __future__ import annotations

from typing import Any

from costs.drafting import SharedDrafter
from protocol.costs import StepCosts
from protocol.ids import PeerAddress
from protocol.roles import ROLES
from protocol.speculation import (
    REMOTE,
    MethodState,
    RequestClass,
    RequestSpeculation,
    SpeculationState,
    StepTimeState,
)
from protocol.worker_to_router import Register, WorkerState
from router.placement import placement_policy
from router.placement.cluster import Cluster
from router.placement.drafts import (
    NOWHERE,
    DraftDecision,
    DraftFacts,
    DraftPlace,
    DraftTarget,
    Prospects,
    decide,
)
from router.placement.interface import (
    Placement,
    PolicyState,
    Prediction,
    Refusal,
    RequestFacts,
    WorkerSnapshot,
)

COSTS = StepCosts(
    step_s=2e-3, row_s=1e-4, context_s=1e-7, token_s=1e-4, attention_s=1e-8, chunk_tokens=512, kv_bytes=8192
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


SEQUENCES = [1 << power for power in range(9)]
DRAFTED = [0, 1, 2, 4, 8]


def step_table(start_s: float, row_s: float) -> StepTimeState:
    """Return step times of a target that takes `start_s` for a step and `row_s` for each row."""
    seconds = [[start_s + row_s * count * (1 + each) for each in DRAFTED] for count in SEQUENCES]
    return StepTimeState(sequences=SEQUENCES, drafted=DRAFTED, seconds=seconds)


def speculation(
    start_s: float = 20e-3,
    row_s: float = 0.15e-3,
    *,
    rate: float = 0.8,
    level_s: float = 1e-3,
    token_s: float = 0.02e-3,
    sampled: float | None = None,
    **draft: Any,
) -> SpeculationState:
    """Return speculation costs of each draft level and each token, with acceptance `rate`."""
    by_class: dict[RequestClass, list[float]] = {} if sampled is None else {"sampled": [sampled] * 8}
    own = MethodState(
        method="draft_model",
        acceptance=[rate] * 8,
        by_class=by_class,
        level_s=level_s,
        token_s=token_s,
        **draft,
    )
    remote = MethodState(method=REMOTE, acceptance=[rate] * 8, by_class=by_class)
    return SpeculationState(max_tokens=8, methods=[own, remote], step_time=step_table(start_s, row_s))


CPU_LIKE = {"start_s": 2e-3, "row_s": 1e-3, "level_s": 0.15e-3, "token_s": 0.15e-3}
"""Two rows take as long as the fixed part of a step."""
GPU_LIKE = {"start_s": 20e-3, "row_s": 0.15e-3}


def target(rows: float, *, model: dict[str, float] | None = None, **changes: Any) -> DraftTarget:
    known = speculation(**(model or GPU_LIKE))
    usual: dict[str, Any] = {"rows": rows, "speculation": known, "method": "draft_model"}
    return DraftTarget(**usual | changes)


def drafter(
    name: str = "draft-0", *, step_s: float = 0.8e-3, row_s: float = 0.01e-3, **changes: Any
) -> SharedDrafter:
    costs = StepCosts(step_s=step_s, row_s=row_s, context_s=0.0, token_s=1e-5, attention_s=0.0)
    usual: dict[str, Any] = {"worker_id": name, "method": "draft_model", "costs": costs}
    return SharedDrafter(**usual | changes)


def decided(
    at: DraftTarget,
    drafters: list[SharedDrafter] | None = None,
    asked: RequestSpeculation | None = None,
    request_class: RequestClass = "greedy",
    **request: Any,
) -> DraftDecision:
    return decide(DraftFacts(**request), Prospects(at, drafters or [], asked, request_class))


def place(at: DraftTarget, drafters: list[SharedDrafter] | None = None, **request: Any) -> DraftPlace:
    return decided(at, drafters, **request).place


def pays(at: DraftTarget, drafters: list[SharedDrafter] | None = None, **request: Any) -> bool:
    """Return whether drafts on the decode worker are predicted to bring more than none. Whether it drafts is
    the decode worker's choice.
    """
    facts, prospects = DraftFacts(**request), Prospects(at, drafters or [])
    local = prospects.local(facts)
    assert local is not None and decide(facts, prospects).place != NOWHERE
    return local.worth > prospects.nowhere(facts).worth
