"""The inputs and results of placement policies: pure functions, the same live and in a simulator.

A policy looks at a few workers of the cluster, never at all. The state that it keeps from one decision to the
next is an argument, and part of the result.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Literal, NamedTuple

from protocol.costs import UNKNOWN_COSTS, StepCosts
from protocol.roles import Task


@dataclass(frozen=True, slots=True)
class RequestFacts:
    """The facts about a request that are known before it runs.

    `num_tokens` must be computed before its first token; it is expected to generate `output_tokens`, and the
    mean request generates `mean_output_tokens`. `prefix_at` is a prefill worker that has computed the prompt
    and may still hold it. `cached_tokens` is the number of leading tokens that each worker is believed to
    have in its prefix cache. `avoid` has workers that failed the request: they are chosen only if there are
    no others. `split` is the client's wish: True for one worker that computes the prompt and another that
    decodes, False for one worker, None for the cheaper way. The request arrived `waited_s` ago, and its SLO
    asks for the first token `slo_ttft_s` after that and for at most `slo_tpot_s` between two tokens.
    """

    num_tokens: int = 0
    output_tokens: float = 0.0
    mean_output_tokens: float = 0.0
    disaggregate: bool = True
    prefix_at: str | None = None
    cached_tokens: Mapping[str, int] = field(default_factory=dict)
    session: str = ""
    avoid: frozenset[str] = frozenset()
    split: bool | None = None
    waited_s: float = 0.0
    slo_ttft_s: float = inf
    slo_tpot_s: float = inf

    def num_uncached(self, source: str) -> int:
        """Return the tokens to compute after those cached on worker `source`: at least the last one."""
        return self.num_tokens - min(self.cached_tokens.get(source, 0), self.num_tokens - 1)


class LinkSpeed(NamedTuple):
    """The speed of a link: seconds for each piece, and bytes a second; 0: not measured."""

    latency_s: float = 0.0
    bytes_per_s: float = 0.0

    def seconds(self, nbytes: float) -> float:
        """Return the seconds to move `nbytes`. A link counts as free until it was used and measured."""
        return self.latency_s + nbytes / self.bytes_per_s if self.bytes_per_s > 0 else self.latency_s


@dataclass(slots=True)
class WorkerSnapshot:
    """A live worker's load; policies only read it.

    `tasks` lists the tasks of its role, its purpose first. Of its `requests`, `rows` are or will be decoded
    there, with `context_tokens` in all, of which it computes `computed_tokens` itself. `prompts` have their
    first token still to come, with `prefill_tokens` to compute, without cached ones. `kv_usage` is the share
    of the KV pool that requests hold, `kv_tokens` the size of that pool; it decodes `max_rows` at once (0
    for either: unknown). `last_placed` rises with each request that is placed anywhere, so the worker with
    the smallest number has waited longest for one. `links` are its links to peers. `on_host` lists all
    workers of its host, including itself; idle ones lend their cores to the others.
    """

    worker_id: str
    tasks: tuple[Task, ...]
    requests: float = 0
    rows: float = 0
    context_tokens: float = 0
    computed_tokens: float = 0
    prefill_tokens: float = 0
    prompts: float = 0
    kv_usage: float = 0.0
    kv_tokens: float = 0
    max_rows: int = 0
    last_placed: int = 0
    costs: StepCosts = UNKNOWN_COSTS
    links: Mapping[str, LinkSpeed] = field(default_factory=dict)
    on_host: Sequence[WorkerSnapshot] = field(default=(), repr=False, compare=False)

    _known: tuple[StepCosts, float, StepCosts] | None = field(default=None, repr=False, compare=False)

    @property
    def busy_neighbours(self) -> list[WorkerSnapshot]:
        """The other workers of its host that use their cores."""
        return [other for other in self.on_host if other.worker_id != self.worker_id and other.requests > 0]

    @property
    def costs_now(self) -> StepCosts:
        """The worker's step costs with the cores that idle workers of its host lend."""
        if not self.costs.borrows:
            return self.costs
        spread = self.spread(1)
        known = self._known
        if known is None or known[0] is not self.costs or known[1] != spread:
            known = self._known = (self.costs, spread, self.costs.on(spread))
        return known[2]

    def spread(self, more: int) -> float:
        """Return its share of cores, in its own ones, if busy neighbours and `more` workers use theirs."""
        return len(self.on_host) / (len(self.busy_neighbours) + more) if self.on_host else 1.0

    @property
    def purpose(self) -> Task:
        return self.tasks[0]


class Prediction(NamedTuple):
    """Predicted seconds of a placement: the request's own, and those that others lose by it.

    Up to the first token: `queue_s` for work ahead of it, `fetch_s` for a prefix from another worker,
    `prefill_s`. Then `handoff_s` as far as no chunk hides it, `room_s` for KV blocks and a row, `decode_s`.
    Requests that decode during its prefill lose `delay_s`, those that decode with it `slowdown_s`.
    """

    queue_s: float = 0.0
    fetch_s: float = 0.0
    prefill_s: float = 0.0
    handoff_s: float = 0.0
    room_s: float = 0.0
    decode_s: float = 0.0
    delay_s: float = 0.0
    slowdown_s: float = 0.0

    @property
    def ttft_s(self) -> float:
        return self.queue_s + self.fetch_s + self.prefill_s

    @property
    def total_s(self) -> float:
        return sum(self)

    def tpot_s(self, output_tokens: float) -> float:
        """Return the time between two tokens, without the first."""
        seconds = self.handoff_s + self.room_s + self.decode_s
        return seconds / (output_tokens - 1) if output_tokens > 1 else 0.0


class Option(NamedTuple):
    """One way to place a request: its tasks in order, and the predicted cost.

    If `prefix` is set, the worker that begins fetches the prompt's prefix from that worker.
    """

    workers: Mapping[Task, str]
    prefix: str | None = None
    predicted: Prediction | None = None


@dataclass(frozen=True, slots=True)
class Placement:
    """The worker of each task of a request, in the order of the tasks.

    Without a worker for `prefill`, the one for `decode` does everything. `missing` is set if that is so only
    because no worker with that purpose exists. If `prefix` is set, the worker that begins fetches the
    prompt's prefix from that worker. `options` are all that were compared, including the chosen one.
    """

    workers: Mapping[Task, str]
    missing: Task | None = None
    prefix: str | None = None
    predicted: Prediction | None = field(default=None, compare=False)
    options: tuple[Option, ...] = field(default=(), compare=False)

    @property
    def source(self) -> str:
        """Return the worker whose cache may hold the prompt's prefix."""
        return next(iter(self.workers.values())) if self.prefix is None else self.prefix


Missed = Literal["slo_ttft", "slo_tpot"]


@dataclass(frozen=True, slots=True)
class Refusal:
    """No worker can serve the request now, or none meets its SLO: then `missed` is set."""

    reason: str
    missed: Missed | None = None
    waiting_helps: bool = False
    retry_after_s: float = 1.0


class PolicyState(NamedTuple):
    """The state of a policy. `turn` counts decisions; `turn` and `seed` together determine random choices."""

    turn: int = 0
    seed: int = 0

    def next(self) -> PolicyState:
        return PolicyState(self.turn + 1, self.seed)


PolicyResult = tuple[Placement | Refusal, PolicyState]
