"""The roles of workers. A new role is one entry in `ROLES`, its option here, and a package with its loop."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

Role = Annotated[str, Meta(min_length=1, max_length=64)]
"""A role's name in `ROLES`."""
Task = Literal["prefill", "decode", "draft"]
"""Tasks of a worker for a request: compute the prompt and hand it over, generate tokens, or draft tokens for
a decode worker.
"""

_Replicas = Annotated[int, Meta(ge=1)]
_Ranks = Annotated[int, Meta(ge=1, le=64)]


class RoleOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Command-line options for the number and the size of each role's workers."""

    prefill_replicas: Annotated[_Replicas, Meta(description="Prefill workers.")] = 1
    decode_replicas: Annotated[_Replicas, Meta(description="Decode workers.")] = 1
    draft_replicas: Annotated[
        int, Meta(ge=0, description="Draft workers, which draft for the requests of all decode workers.")
    ] = 0
    prefill_tensor_parallel_size: Annotated[
        _Ranks,
        Meta(description="Processes that share the heads and weights of each prefill worker, on a CPU."),
    ] = 1
    decode_tensor_parallel_size: Annotated[
        _Ranks,
        Meta(description="Processes that share the heads and weights of each decode worker, on a CPU."),
    ] = 1


class RoleSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One role. Pure data: the launcher sends it to each worker's process.

    `loop` names the class of its engine loop, as "module:class". `replicas` is the option for the number of
    its workers, `ranks` the option for the number of processes of each, by default 1. A worker may be asked
    for any of `tasks`; the first is its purpose, the others serve when no worker with that purpose is left.
    It pushes blocks to workers of the roles in `pushes_to`, and connects to them before the first request.
    """

    name: str
    loop: str
    replicas: str
    ranks: str = ""
    tasks: tuple[Task, ...]
    pushes_to: tuple[str, ...] = ()
    needs_disaggregation: bool = False
    holds_draft: bool = False
    """Whether its engine runs the draft model of --speculative-config."""

    @property
    def purpose(self) -> Task:
        return self.tasks[0]


_SPECS = (
    RoleSpec(
        name="prefill",
        loop="prefill_worker.loop:PrefillLoop",
        replicas="prefill_replicas",
        ranks="prefill_tensor_parallel_size",
        tasks=("prefill", "decode"),
        pushes_to=("decode",),
        needs_disaggregation=True,
    ),
    RoleSpec(
        name="decode",
        loop="decode_worker.loop:DecodeLoop",
        replicas="decode_replicas",
        ranks="decode_tensor_parallel_size",
        tasks=("decode",),
    ),
    RoleSpec(
        name="draft",
        loop="draft_worker.loop:DraftLoop",
        replicas="draft_replicas",
        tasks=("draft",),
        holds_draft=True,
    ),
)

ROLES: dict[str, RoleSpec] = {spec.name: spec for spec in _SPECS}
