"""What a placement policy sees and answers. A policy is a pure function, the same live and in a simulator."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from protocol.roles import Task


@dataclass(frozen=True, slots=True)
class RequestFacts:
    """What is known of a request before it runs.

    `prefix_at` is a prefill worker that has computed the prompt and may still hold it. `cached_tokens` tells
    how many leading tokens each worker is believed to have in its prefix cache.
    """

    disaggregate: bool = True
    prefix_at: str | None = None
    cached_tokens: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class WorkerSnapshot:
    """A live worker's load.

    `tasks` is what its role may be asked, its purpose first. `prefill_tokens` counts those of prompts whose
    first token is still to come. `kv_usage` is the share of the KV pool that running requests hold.
    """

    worker_id: str
    tasks: tuple[Task, ...]
    requests: int = 0
    prefill_tokens: int = 0
    kv_usage: float = 0.0

    @property
    def purpose(self) -> Task:
        return self.tasks[0]


@dataclass(frozen=True, slots=True)
class Placement:
    """Which worker does which task of a request, in the order of the tasks.

    Without a worker for `prefill`, the one for `decode` does all of it. `missing` is set if that is so only
    because no worker with that purpose is there. The worker that begins is to fetch the prompt's prefix from
    the worker `prefix`, if that is set.
    """

    workers: Mapping[Task, str]
    missing: Task | None = None
    prefix: str | None = None


@dataclass(frozen=True, slots=True)
class Refusal:
    """No worker can take the request now."""

    reason: str


PlacementPolicy = Callable[[RequestFacts, Sequence[WorkerSnapshot]], Placement | Refusal]
