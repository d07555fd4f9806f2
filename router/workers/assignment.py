"""A request's assignment to workers: its stage, the load that it puts on them, and the demand on each role,
as counters that an autoscaler compares over time.
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import inf
from typing import Literal

import msgspec

from protocol.roles import Task
from router.placement.interface import Refusal
from router.workers.registry import Registry, Worker

LiveStage = Literal["queue", "prefill", "transfer", "decode"]
"""A stage as operators see it. "queue": no worker has the request; "prefill": its first token has not come;
"transfer": its decode worker has not sent a token; "decode": it decodes.
"""


class Stage(enum.Enum):
    HELD = "held"
    """The router keeps the request until its workers have room."""
    PREFILL = "prefill"
    """The request was sent. Its first token has not come."""
    TRANSFER = "transfer"
    """The prefill worker has answered and holds the request until the decode worker has taken it over."""
    HANDED_OVER = "handed_over"
    """The prefill worker has freed the request. The decode worker has not sent a token yet."""
    DECODE = "decode"
    """The decode worker has sent a token."""
    UNPLACED = "unplaced"
    """No worker has the request: it waits for a placement, or has ended."""

    @property
    def shown(self) -> LiveStage:
        return _SHOWN.get(self, "queue")


_NEXT: Mapping[Stage, frozenset[Stage]] = {
    Stage.HELD: frozenset({Stage.PREFILL, Stage.UNPLACED}),
    Stage.PREFILL: frozenset({Stage.TRANSFER, Stage.DECODE, Stage.UNPLACED}),
    Stage.TRANSFER: frozenset({Stage.HANDED_OVER, Stage.DECODE, Stage.UNPLACED}),
    Stage.HANDED_OVER: frozenset({Stage.DECODE, Stage.UNPLACED}),
    Stage.DECODE: frozenset({Stage.UNPLACED}),
    Stage.UNPLACED: frozenset(),
}
_SHOWN: Mapping[Stage, LiveStage] = {
    Stage.PREFILL: "prefill",
    Stage.TRANSFER: "transfer",
    Stage.HANDED_OVER: "transfer",
    Stage.DECODE: "decode",
}
_DECODE = Stage.DECODE
"""An alias: each token needs this member, and Python 3.11 looks up members of enumerations slowly."""
_AT_FIRST = (Stage.HELD, Stage.PREFILL, Stage.TRANSFER)
_ANSWERED = (_DECODE, Stage.TRANSFER, Stage.HANDED_OVER)
_SENT = (*_ANSWERED, Stage.PREFILL)


@dataclass(eq=False, slots=True)
class Assignment:
    """The workers of one placement of a request. Only `Loads` moves it from stage to stage.

    | stage                 | what happens                                                   | next        |
    |-----------------------|----------------------------------------------------------------|-------------|
    | (new)                 | the placement policy has chosen the workers                    | HELD        |
    | HELD                  | the workers have room: the request is sent to the first        | PREFILL     |
    | PREFILL               | its first token comes, and another worker is to decode         | TRANSFER    |
    | PREFILL               | its first token comes, and it decodes, too                     | DECODE      |
    | PREFILL, TRANSFER     | another decode worker is named                                 | (the same)  |
    | TRANSFER              | no other decode worker is left: the prefill worker decodes     | DECODE      |
    | TRANSFER              | asked about it, the prefill worker says that it has freed it   | HANDED_OVER |
    | TRANSFER, HANDED_OVER | the decode worker's first token comes                          | DECODE      |
    | (any)                 | the request ends, or is to be placed again                     | UNPLACED    |

    `first` gets the request and computes the `num_uncached` of the `num_tokens` tokens that it does not find
    in its cache; `decode` generates the answer and may be the same worker.
    """

    first: Worker
    decode: Worker
    num_tokens: int
    num_uncached: int
    stage: Stage = Stage.HELD

    @property
    def prefill(self) -> Worker | None:
        """The prefill worker while it has the request, else None."""
        return self.first if self.first is not self.decode and self.stage in _AT_FIRST else None

    @property
    def worker(self) -> Worker:
        """The worker that has the request, or has sent its end already, unless a message got lost."""
        return self.prefill or self.decode

    @property
    def holders(self) -> list[Worker]:
        """The workers that may hold blocks or a queue entry of the request."""
        if self.stage is Stage.UNPLACED:
            return []
        return [self.decode] if self.prefill is None else [self.first, self.decode]

    def is_sent_to(self, worker: Worker) -> bool:
        """Return whether the worker has been sent the request, so that it may send outputs."""
        return self.stage in _SENT and (worker is self.decode or worker is self.prefill)

    @property
    def has_answered(self) -> bool:
        """Whether a token has come."""
        return self.stage in _ANSWERED

    @property
    def is_decoding(self) -> bool:
        """Whether the decode worker has sent a token."""
        return self.stage is _DECODE

    @property
    def answered_by(self) -> Worker | None:
        """The worker that sent the newest token."""
        if self.stage is Stage.DECODE:
            return self.decode
        return self.first if self.has_answered else None

    @property
    def waits_at(self) -> Worker | None:
        """The worker from which the first token is due."""
        return self.first if self.stage in (Stage.HELD, Stage.PREFILL) else None

    @property
    def worker_ids(self) -> dict[Task, str]:
        """Ids of the workers by task, also after the request has left them."""
        decode: dict[Task, str] = {"decode": self.decode.key.worker_id}
        return decode if self.first is self.decode else {"prefill": self.first.key.worker_id, **decode}

    def enter(self, stage: Stage) -> None:
        assert stage in _NEXT[self.stage], f"{self.stage.name} -> {stage.name}"
        self.stage = stage


class Loads:
    """The loads of workers: each assignment, which moves from stage to stage here, counts once."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._order = itertools.count(1)

    def assign(self, first: Worker, decode: Worker, num_tokens: int, num_uncached: int) -> Assignment:
        """Assign a request of `num_tokens` tokens, of which `first` has to compute `num_uncached`."""
        assignment = Assignment(first, decode, num_tokens, num_uncached)
        first.outstanding_prompts += 1
        first.outstanding_prefill_tokens += num_uncached
        _count_computed(assignment, 1)
        _count_row(assignment, 1)
        for worker in assignment.holders:
            worker.outstanding_requests += 1
            worker.load.last_placed = next(self._order)
            self._registry.changed(worker)
        return assignment

    def sent(self, assignment: Assignment) -> None:
        assignment.enter(Stage.PREFILL)

    def answered(self, assignment: Assignment) -> None:
        """Move the assignment to the stage after its first token."""
        first = assignment.waits_at
        _enter(assignment, Stage.DECODE if assignment.prefill is None else Stage.TRANSFER)
        self._stop_waiting(assignment, first)

    def handed_over(self, assignment: Assignment) -> None:
        """Remove the request from its prefill worker, which has freed it."""
        self._leave_prefill(assignment, Stage.HANDED_OVER)

    def taken_over(self, assignment: Assignment) -> None:
        """Move the assignment to `DECODE`, at the first token of the decode worker."""
        self._leave_prefill(assignment, Stage.DECODE)

    def redirect(self, assignment: Assignment, target: Worker) -> None:
        """Move the request to another decode worker, which may be its prefill worker."""
        failed = assignment.decode
        _count_row(assignment, -1)
        failed.outstanding_requests -= 1
        assignment.decode = target
        _count_row(assignment, 1)
        if target is not assignment.first:
            target.outstanding_requests += 1
            target.load.last_placed = next(self._order)
        elif assignment.stage is Stage.TRANSFER:
            _enter(assignment, Stage.DECODE)
        for worker in (failed, target):
            self._registry.changed(worker)

    def release(self, assignment: Assignment) -> None:
        """Remove the request from all its workers."""
        if assignment.stage is Stage.UNPLACED:
            return
        self._stop_waiting(assignment, assignment.waits_at)
        _count_computed(assignment, -1)
        _count_row(assignment, -1)
        for worker in assignment.holders:
            worker.outstanding_requests -= 1
        for worker in {assignment.first, assignment.decode}:
            self._registry.changed(worker)
        _enter(assignment, Stage.UNPLACED)

    def _stop_waiting(self, assignment: Assignment, first: Worker | None) -> None:
        if first is not None:
            first.outstanding_prompts -= 1
            first.outstanding_prefill_tokens -= assignment.num_uncached
            self._registry.changed(first)

    def _leave_prefill(self, assignment: Assignment, stage: Stage) -> None:
        prefill = assignment.prefill
        _enter(assignment, stage)
        if prefill is not None:
            prefill.outstanding_requests -= 1
            self._registry.changed(prefill)


def _enter(assignment: Assignment, stage: Stage) -> None:
    """Enter a stage, and count the request at its decode worker if it begins or ceases to decode there."""
    assignment.decode.num_decoding += (stage is _DECODE) - assignment.is_decoding
    assignment.enter(stage)


def _count_row(assignment: Assignment, sign: int) -> None:
    decode = assignment.decode
    decode.outstanding_rows += sign
    decode.outstanding_context += sign * assignment.num_tokens


def _count_computed(assignment: Assignment, sign: int) -> None:
    assignment.first.outstanding_computed += sign
    assignment.first.outstanding_computed_tokens += sign * assignment.num_uncached


class RoleDemand(msgspec.Struct):
    """Counters of a role's requests since the router's start, which only rise.

    `prompts` were assigned to the role for prefill; on an otherwise idle worker they take `prompt_s` seconds,
    and `prompt_s2` sums the squares of these. `judged`: first tokens and finished answers with an SLO, and
    refusals. `missed`: judged ones that were later than their SLO, or refused because of it.
    """

    prompts: int = 0
    prompt_s: float = 0.0
    prompt_s2: float = 0.0
    judged: int = 0
    missed: int = 0

    def __sub__(self, other: RoleDemand) -> RoleDemand:
        """Subtract, never below 0: the counters of a restarted router begin at 0."""
        return self._with(other, -1)

    def __add__(self, other: RoleDemand) -> RoleDemand:
        return self._with(other, 1)

    def _with(self, other: RoleDemand, sign: int) -> RoleDemand:
        pairs = zip(msgspec.structs.astuple(self), msgspec.structs.astuple(other), strict=True)
        return RoleDemand(*(max(one + sign * another, 0) for one, another in pairs))


Demand = Mapping[str, RoleDemand]
"""Demand by role name."""


def sum_of(demands: Iterable[Demand]) -> dict[str, RoleDemand]:
    found: dict[str, RoleDemand] = {}
    for demand in demands:
        for role, counted in demand.items():
            found[role] = found.get(role, RoleDemand()) + counted
    return found


def alone_s(assignment: Assignment) -> float:
    """Return the seconds that the first worker takes to compute the prompt if it is otherwise idle."""
    costs, before = assignment.first.load.costs, assignment.num_tokens - assignment.num_uncached
    return costs.prompt_s(assignment.num_uncached, before, costs.chunk_tokens)


class DemandMeter:
    """Counters of the demand that the requests of one router, or of a simulation, put on the roles."""

    def __init__(self) -> None:
        self.demand: dict[str, RoleDemand] = {}

    def placed(self, assignment: Assignment) -> None:
        """Count a prompt that its first worker has to compute."""
        seconds = alone_s(assignment)
        counted = self._of(assignment.first.role.name)
        counted.prompts += 1
        counted.prompt_s += seconds
        counted.prompt_s2 += seconds * seconds

    def answered(self, assignment: Assignment, ttft_s: float, slo_s: float) -> None:
        """Judge the TTFT, unless the prompt is too long for its SLO."""
        if alone_s(assignment) <= slo_s:
            self._judge(assignment.first, ttft_s, slo_s)

    def finished(self, worker: Worker, tpot_s: float, slo_s: float) -> None:
        """Judge the time per output token of a finished answer of this worker."""
        self._judge(worker, tpot_s, slo_s)

    def _judge(self, worker: Worker, seconds: float, slo_s: float) -> None:
        if slo_s < inf:
            counted = self._of(worker.role.name)
            counted.judged += 1
            counted.missed += seconds > slo_s

    def refused(self, refusal: Refusal, workers: Iterable[Worker]) -> None:
        """Count a request that was refused because these workers are too few for its SLO."""
        if refusal.missed is None or not refusal.waiting_helps:
            return
        purposes = {worker.role.purpose: worker.role.name for worker in workers}
        task: Task = "prefill" if refusal.missed == "slo_ttft" and "prefill" in purposes else "decode"
        counted = self._of(purposes.get(task, task))
        counted.judged += 1
        counted.missed += 1

    def _of(self, role: str) -> RoleDemand:
        return self.demand.setdefault(role, RoleDemand())
