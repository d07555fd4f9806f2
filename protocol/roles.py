"""The roles of workers. A new role is one entry in `ROLES`, its option here, and a package with its loop."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from protocol.errors import ConfigError
from protocol.fields import named_texts

Role = Annotated[str, Meta(min_length=1, max_length=64)]
"""A role's name in `ROLES`."""
Task = Literal["prefill", "decode", "draft"]
"""Tasks of a worker: compute a prompt and hand it over, generate tokens, or draft them."""

MAX_WORKERS = 4096
"""Most workers of one role."""
_Replicas = Annotated[int, Meta(ge=1, le=MAX_WORKERS)]
_Ranks = Annotated[int, Meta(ge=1, le=64)]


@dataclass(frozen=True, kw_only=True)
class RoleOptions:
    """Command-line options for the number and the size of each role's workers."""

    prefill_replicas: _Replicas = 1
    """Prefill workers."""
    decode_replicas: _Replicas = 1
    """Decode workers."""
    draft_replicas: Annotated[int, Meta(ge=0, le=MAX_WORKERS)] = 0
    """Draft workers, which draft for the requests of all decode workers."""
    prefill_tensor_parallel_size: _Ranks = 1
    """Processes that share the heads and weights of each prefill worker, on a CPU or on a GPU each."""
    decode_tensor_parallel_size: _Ranks = 1
    """Processes that share the heads and weights of each decode worker, on a CPU or on a GPU each."""


class RoleSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One role, as data that the launcher sends to each worker's process.

    `loop` names the class of its engine loop, as "module:class". `replicas` is the option for the number of
    its workers, `ranks` the option for the number of processes of each, by default 1. The first of `tasks` is
    a worker's purpose; it does the others when no worker with that purpose is left. A worker pushes blocks to
    workers of the roles in `pushes_to`, and connects to them before the first request.
    """

    name: str
    loop: str
    replicas: str
    ranks: str = ""
    tasks: tuple[Task, ...]
    pushes_to: tuple[str, ...] = ()
    needs_disaggregation: bool = False
    holds_draft: bool = False
    """Whether the role's engine runs the draft model of --speculative-config."""

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


_RANGE = re.compile(r"\s*(\d{1,9})\s*:\s*(\d{1,9})\s*\Z")

_Workers = Annotated[int, Meta(ge=1, le=MAX_WORKERS)]


class WorkerRange(msgspec.Struct, frozen=True):
    """The minimum and maximum number of workers of a role."""

    least: _Workers
    most: _Workers

    def __str__(self) -> str:
        return f"{self.least}:{self.most}"


def parse_autoscale(value: object, flag: str) -> dict[str, WorkerRange]:
    """Parse `prefill=1:4,decode=1:8`, or a mapping of roles to `1:4`. Raises `ConfigError`."""
    example = "roles with ranges, as in prefill=1:4,decode=1:8"
    found = named_texts(value, flag, example)
    if not found:
        raise ConfigError(f"{flag}: must be {example}, got {value!r}")
    for role in found:
        if role not in ROLES:
            raise ConfigError(f"{flag}: there is no role {role!r}; there are {', '.join(ROLES)}")
    return {role: _range(text, f"{flag}: {role}") for role, text in found.items()}


def _range(text: str, what: str) -> WorkerRange:
    match = _RANGE.match(text)
    least, most = map(int, match.groups()) if match else (0, 0)
    if not 1 <= least <= most <= MAX_WORKERS:
        raise ConfigError(
            f"{what}: must be LEAST:MOST, whole numbers from 1 to {MAX_WORKERS}, the first not above the "
            f"second, got {text.strip()!r}"
        )
    return WorkerRange(least, most)
