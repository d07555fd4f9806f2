"""What a placement policy sees and answers. A policy is a pure function, the same live and in a simulator."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from protocol.messages import Lifecycle
from protocol.roles import Task


@dataclass(frozen=True, slots=True)
class RequestFacts:
    """What is known of a request before it runs.

    `num_prompt_tokens` counts what must be computed before its next token: the prompt, and what was emitted
    before a failover. `prefix_at` is a prefill worker that has computed the prompt and may still hold it.
    `cached_tokens` tells how many leading tokens each worker is believed to have in its prefix cache.
    """

    num_prompt_tokens: int
    disaggregate: bool = True
    prefix_at: str | None = None
    cached_tokens: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class WorkerSnapshot:
    """A live worker's load.

    `outstanding_*` is what this router has sent and not seen finished, up to the moment; `reported_*` is the
    worker's own view, of all routers' requests, as old as its last heartbeat. Prefill tokens are those of
    prompts whose first token is still to come. `tasks` is what its role may be asked, its purpose first.
    """

    worker_id: str
    tasks: tuple[Task, ...]
    lifecycle: Lifecycle = "ready"
    outstanding_requests: int = 0
    outstanding_prefill_tokens: int = 0
    reported_requests: int = 0
    reported_prefill_tokens: int = 0
    total_blocks: int = 0
    free_blocks: int = 0

    @property
    def purpose(self) -> Task:
        return self.tasks[0]

    @property
    def requests(self) -> int:
        return max(self.outstanding_requests, self.reported_requests)

    @property
    def prefill_tokens(self) -> int:
        return max(self.outstanding_prefill_tokens, self.reported_prefill_tokens)

    @property
    def kv_usage(self) -> float:
        """Share of the KV pool that running requests hold."""
        return 1 - self.free_blocks / self.total_blocks if self.total_blocks else 0.0


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
    retry_after_s: float = 1.0


PlacementPolicy = Callable[[RequestFacts, Sequence[WorkerSnapshot]], Placement | Refusal]
