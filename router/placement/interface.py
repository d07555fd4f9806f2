"""The inputs and results of placement policies, which are pure functions, the same live and in a simulator.

A policy looks at a few workers of the cluster, never at all of them. The state that it keeps from one
decision to the next is an argument and a part of the result.
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

    `num_tokens` must be computed before its first token. It is expected to generate `output_tokens`, the mean
    request `mean_output_tokens`. `prefix_at`: a prefill worker that has computed the prompt and may still
    hold it. `cached_tokens`: leading tokens that each worker probably has in its prefix cache. `avoid`:
    workers that failed the request, chosen only if there are no others. `split`: the client's wish; True:
    prefill and decode on two workers, False: on one, None: the cheaper way. The request arrived `waited_s`
    ago; its SLO demands the first token within `slo_ttft_s` of its arrival, and at most `slo_tpot_s` between
    two tokens.
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
        """Return the tokens to compute, at least one, given the prefix cache of worker `source`."""
        return self.num_tokens - min(self.cached_tokens.get(source, 0), self.num_tokens - 1)


class LinkSpeed(NamedTuple):
    """The speed of a link: seconds per piece, and bytes a second (0: not measured)."""

    latency_s: float = 0.0
    bytes_per_s: float = 0.0

    def seconds(self, nbytes: float) -> float:
        """Return the seconds to move `nbytes`. A link counts as free until its speed was measured."""
        return self.latency_s + nbytes / self.bytes_per_s if self.bytes_per_s > 0 else self.latency_s


@dataclass(slots=True)
class WorkerSnapshot:
    """The load of a live worker; policies only read it.

    `tasks`: the tasks of its role, its purpose first. `rows` of its `requests` decode or will decode there,
    with `context_tokens` in all. `computed_prompts`: live requests whose prompts are or were computed there,
    wherever they decode, with `computed_tokens` in all. `prompts`: requests whose first token is due from
    there, with `prefill_tokens` uncached tokens in all. `kv_usage`: share of its KV
    pool of `kv_tokens` that requests hold. `max_rows`: most rows of a batch. 0 for either size: unknown.
    `last_placed`: number of the latest placement there, counted over all workers; the worker with the
    smallest number has waited longest. `links`: its links to peers. `on_host`: all workers of its host,
    including itself; idle ones lend their cores.
    """

    worker_id: str
    tasks: tuple[Task, ...]
    requests: float = 0
    rows: float = 0
    context_tokens: float = 0
    computed_prompts: float = 0
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
    def neighbours(self) -> list[WorkerSnapshot]:
        """The other workers of the host."""
        return [other for other in self.on_host if other.worker_id != self.worker_id]

    @property
    def busy_neighbours(self) -> list[WorkerSnapshot]:
        """The neighbours that have requests now."""
        return [other for other in self.neighbours if other.requests > 0]

    @property
    def costs_now(self) -> StepCosts:
        """The worker's step costs with the cores that workers without any request lend at this moment."""
        if not self.costs.borrows:
            return self.costs
        spread = self.spread(len(self.busy_neighbours))
        known = self._known
        if known is None or known[0] is not self.costs or known[1] != spread:
            known = self._known = (self.costs, spread, self.costs.on(spread))
        return known[2]

    def spread(self, busy: float) -> float:
        """Return the worker's cores per own core if `busy` of its neighbours use theirs, on average."""
        return len(self.on_host) / (busy + 1) if self.on_host else 1.0

    @property
    def purpose(self) -> Task:
        return self.tasks[0]


class Prediction(NamedTuple):
    """The predicted seconds of a placement: its own stages, and the time that other requests lose by it.

    Until the first token: `queue_s` for earlier prompts, `fetch_s` for a prefix from another worker,
    `prefill_s`. After it: `handoff_s` for blocks not sent during the prefill, `room_s` for KV blocks and a
    row, `decode_s`; a split request loses `coming_s` to later prompts, unless these are split as well. Other
    requests lose `delay_s` during its prefill, and `slowdown_s` while it decodes.
    """

    queue_s: float = 0.0
    fetch_s: float = 0.0
    prefill_s: float = 0.0
    handoff_s: float = 0.0
    room_s: float = 0.0
    decode_s: float = 0.0
    coming_s: float = 0.0
    delay_s: float = 0.0
    slowdown_s: float = 0.0

    @property
    def ttft_s(self) -> float:
        return self.queue_s + self.fetch_s + self.prefill_s

    @property
    def total_s(self) -> float:
        return sum(self)

    def tpot_s(self, output_tokens: float) -> float:
        """Return the mean time between two output tokens, if later requests are placed like this one."""
        seconds = self.handoff_s + self.room_s + self.decode_s
        return seconds / (output_tokens - 1) if output_tokens > 1 else 0.0


class Option(NamedTuple):
    """One way to place a request: the worker of each task, in order, and the predicted cost.

    If `prefix` is set, the first worker fetches the leading blocks from that worker.
    """

    workers: Mapping[Task, str]
    prefix: str | None = None
    predicted: Prediction | None = None


@dataclass(frozen=True, slots=True)
class Placement:
    """The worker of each task of a request, in the order of the tasks.

    Without a worker for `prefill`, the decode worker does both tasks; `missing` is set if the reason is that
    no worker has that purpose. If `prefix` is set, the first worker fetches the leading blocks from that
    worker. `options`: all options compared, including the chosen one.
    """

    workers: Mapping[Task, str]
    missing: Task | None = None
    prefix: str | None = None
    predicted: Prediction | None = field(default=None, compare=False)
    options: tuple[Option, ...] = field(default=(), compare=False)

    @property
    def source(self) -> str:
        """The worker whose cache may hold the prompt's prefix."""
        return next(iter(self.workers.values())) if self.prefix is None else self.prefix


Missed = Literal["slo_ttft", "slo_tpot"]


@dataclass(frozen=True, slots=True)
class Refusal:
    """A refusal: no worker can serve the request now, or (`missed`) none is expected to meet its SLO."""

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
