"""What a placement policy sees and answers. A policy is a pure function, the same live and in a simulator.

It looks at a few workers of the cluster and never at all of them. What it must remember from one decision to
the next is an argument, and part of the answer.
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
    """What is known of a request before it runs.

    `num_tokens` are to be computed before its first token, and it is expected to bring `output_tokens`;
    the mean of all requests is `mean_output_tokens`. `prefix_at` is a prefill worker that has computed the
    prompt and may still hold it. `cached_tokens` tells how many leading tokens each worker is believed to
    have in its prefix cache. `avoid` are workers that have failed the request: they are taken where there are
    no others. `split` is what the client asks for: that one worker computes the prompt and another decodes,
    or that one does both; None: what costs least. It came `waited_s` ago, and asks for its first token
    `slo_ttft_s` after that, and for at most `slo_tpot_s` between two tokens.
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


class LinkSpeed(NamedTuple):
    """Of the wire from a worker to a peer: seconds of each piece, and bytes a second; 0: not measured."""

    latency_s: float = 0.0
    bytes_per_s: float = 0.0

    def seconds(self, nbytes: float) -> float:
        """A wire that was never used is taken for free, so that it gets used and measured."""
        return self.latency_s + nbytes / self.bytes_per_s if self.bytes_per_s > 0 else self.latency_s


@dataclass(slots=True)
class WorkerSnapshot:
    """A live worker's load; policies only read it.

    `tasks` is what its role may be asked, its purpose first. Of its `requests`, `rows` are or will be
    decoded there, with `context_tokens` in all, of which it computes `computed_tokens` itself.
    `prefill_tokens` are those of `prompts` whose first token is still to come, less what is cached.
    `kv_usage` is the share of the KV pool that requests hold, `kv_tokens` the size of that pool; it decodes
    `max_rows` at once (of both, 0: unknown). `last_placed` rises with each request that is placed anywhere:
    who has the smallest number was asked the longest ago. `links` are its wires to peers. `on_host` are the
    workers of its host, which lend each other their cores while idle; it is among them.
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
        """The other workers of its host that keep their cores."""
        return [other for other in self.on_host if other.worker_id != self.worker_id and other.requests > 0]

    @property
    def costs_now(self) -> StepCosts:
        """With the cores that idle workers of its host lend."""
        if not self.costs.borrows:
            return self.costs
        spread = self.spread(1)
        known = self._known
        if known is None or known[0] is not self.costs or known[1] != spread:
            known = self._known = (self.costs, spread, self.costs.on(spread))
        return known[2]

    def spread(self, more: int) -> float:
        """Its cores, as a multiple of its own, if besides its busy neighbours so many workers need theirs."""
        return len(self.on_host) / (len(self.busy_neighbours) + more) if self.on_host else 1.0

    @property
    def purpose(self) -> Task:
        return self.tasks[0]


class Prediction(NamedTuple):
    """Seconds that a placement is expected to take: the request's own, and those that others lose by it.

    To its first token: `queue_s` for what is ahead of it, `fetch_s` for a prefix from another worker,
    `prefill_s`. Then `handoff_s` to its decode worker, as far as no chunk hides it, `room_s` for KV blocks
    and a row, `decode_s`. `delay_s` is what requests that decode beside its prefill lose, `slowdown_s` those
    beside its decode.
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


class Option(NamedTuple):
    """One way to place a request, its tasks in order, and what it is expected to cost.

    The worker that begins is to fetch the prompt's prefix from the worker `prefix`, if that is set.
    """

    workers: Mapping[Task, str]
    prefix: str | None = None
    predicted: Prediction | None = None


@dataclass(frozen=True, slots=True)
class Placement:
    """Which worker does which task of a request, in the order of the tasks.

    Without a worker for `prefill`, the one for `decode` does all of it. `missing` is set if that is so only
    because no worker with that purpose is there. The worker that begins is to fetch the prompt's prefix from
    the worker `prefix`, if that is set. `options` are those that were compared, the chosen one among them.
    """

    workers: Mapping[Task, str]
    missing: Task | None = None
    prefix: str | None = None
    predicted: Prediction | None = field(default=None, compare=False)
    options: tuple[Option, ...] = field(default=(), compare=False)
    reason: str = field(default="", compare=False)


Missed = Literal["slo_ttft", "slo_tpot"]


@dataclass(frozen=True, slots=True)
class Refusal:
    """No worker can take the request now, or none soon enough for what it asks: then `missed` is set."""

    reason: str
    missed: Missed | None = None
    waiting_helps: bool = False
    retry_after_s: float = 1.0


class PolicyState(NamedTuple):
    """`turn` counts decisions; with `seed` it keys what is random."""

    turn: int = 0
    seed: int = 0

    def next(self) -> PolicyState:
        return PolicyState(self.turn + 1, self.seed)


Answer = tuple[Placement | Refusal, PolicyState]
