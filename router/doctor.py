"""Bottlenecks that keep requests waiting, found by pure functions of two samples of the cluster.

The cost of a finding is the mean number of requests that the bottleneck delays at any moment.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from operator import attrgetter
from typing import Literal, NamedTuple

import msgspec

from costs.drafting import StepCurve
from protocol.speculation import SpeculationState
from protocol.worker_to_router import WorkerState
from router.placement.interface import WorkerSnapshot


class WorkerSample(NamedTuple):
    """A worker's latest heartbeat, its load, and the number of its requests that still wait in the router."""

    state: WorkerState
    load: WorkerSnapshot
    held: int = 0

    @property
    def id(self) -> str:
        return self.load.worker_id


class ClusterSample(msgspec.Struct, frozen=True, kw_only=True):
    """Values of the router and all workers at `at` monotonic seconds.

    `totals`: metrics of the router by name. `refused`: refused requests by reason.
    """

    at: float
    workers: list[WorkerSample] = []
    live: int = 0
    parked: int = 0
    max_num_seqs: int = 0
    totals: dict[str, float] = {}
    refused: dict[str, float] = {}

    def worker(self, worker_id: str) -> WorkerSample | None:
        return next((worker for worker in self.workers if worker.id == worker_id), None)


Name = Literal["prefill", "decode", "transfer", "router", "kv_room", "queue", "draft", "nothing"]

BUSY = 0.8
"""Busy share of a worker's time above which its speed is the bottleneck."""
WAITING_PROMPTS = 1.5
"""Prompts at a worker above which prompts wait: more than the running one and an occasional second one."""
SLOWED = 1.5
"""Factor by which a batch's decode step must be slower than a single request's."""
EXPOSED_SHARE = 0.2
"""Share of the time from a prompt's start to its decoding that may be spent waiting for its blocks."""
EXPOSED_S = 0.02
"""[seconds] Hand-off time that is normal: its messages and the rest of a step."""
ROUTER_BUSY = 0.7
"""[cores] Load of the router's event loop that counts as busy."""
ROUTER_LAG_S = 0.02
DRAFT_LOSS = 0.03
"""Share of tokens lost by drafts below which a loss counts as noise."""
MORE_PREFILL = "add prefill workers (--prefill-replicas)"
MORE_DECODE = "add decode workers (--decode-replicas)"
LEAST_COST = 0.05
"""[requests] Least cost of a finding: one of twenty moments has a delayed request."""


class Finding(msgspec.Struct, frozen=True):
    """A bottleneck: its cost, its worker if it concerns one, its figures, and the remedy."""

    name: Name
    cost: float
    summary: str
    change: str
    worker: str | None = None
    figures: dict[str, float] = {}


class Interval(NamedTuple):
    """The time between two samples."""

    before: ClusterSample
    after: ClusterSample

    @property
    def seconds(self) -> float:
        return max(self.after.at - self.before.at, 1e-9)

    def total(self, name: str) -> float:
        """Return the increase of one of the router's totals."""
        return max(self.after.totals.get(name, 0.0) - self.before.totals.get(name, 0.0), 0.0)

    def mean_s(self, histogram: str) -> float:
        """Return the mean of a histogram's new values, in seconds."""
        count = self.total(f"{histogram}_count")
        return self.total(f"{histogram}_sum") / count if count else 0.0

    def workers(self) -> Iterator[WorkerSpan]:
        for after in self.after.workers:
            before = self.before.worker(after.id)
            if before is not None and before.state.steps <= after.state.steps:
                yield WorkerSpan(before, after, self.seconds)


class WorkerSpan(NamedTuple):
    before: WorkerSample
    after: WorkerSample
    seconds: float

    def gained(self, counter: str) -> float:
        """Return the increase of one of the worker's counters, summed over its labels."""
        before, after = (_sum(each.state.counters, counter) for each in (self.before, self.after))
        return max(after - before, 0.0)

    def sent(self, peer: str, name: str) -> float:
        """Return the increase of a total of the transfers to a peer, over all transports."""
        before, after = (
            sum(each.counters.get(f"kv_transfer_{name}_total", 0.0) for each in pairs if each.peer == peer)
            for pairs in (self.before.state.pairs, self.after.state.pairs)
        )
        return after - before

    def mean(self, name: str) -> float:
        """Return the mean of an attribute of the samples."""
        value = attrgetter(name)
        return float((value(self.before) + value(self.after)) / 2)

    @property
    def busy(self) -> float:
        """Share of the time in which the worker had something to do."""
        spent_s = self.gained("engine_seconds_total") + self.gained("loop_seconds_total")
        return min(spent_s / self.seconds, 1.0)

    @property
    def blocked(self) -> float:
        """Share of the time in which a request waited there for blocks."""
        return min(self.gained("kv_room_wait_seconds_total") / self.seconds, 1.0)

    @property
    def num_steps(self) -> int:
        return self.after.state.steps - self.before.state.steps

    @property
    def decode_share(self) -> float:
        """Share of the time that the steps would take without prompts, by the cost model."""
        if self.after.load.purpose == "prefill" and self.mean("load.rows") == 0:
            return 0.0
        step_s = self.after.state.costs.decode_s(self.mean("state.num_running"), self.running_context)
        steps_s = self.num_steps * step_s
        return min(steps_s / max(self.gained("engine_seconds_total"), 1e-9), 1.0)

    @property
    def running_context(self) -> float:
        rows, running = self.mean("load.rows"), self.mean("state.num_running")
        return self.mean("load.context_tokens") * min(running / rows, 1.0) if rows else 0.0


def examine(before: ClusterSample, after: ClusterSample) -> list[Finding]:
    """Return all bottlenecks, the most costly first, or a finding that there is no bottleneck."""
    interval = Interval(before, after)
    found = [finding for verdict in VERDICTS for finding in verdict(interval) if finding.cost >= LEAST_COST]
    if not found:
        live = (before.live + after.live) / 2
        return [Finding("nothing", 0.0, f"nothing holds requests up; {live:g} are under way", "nothing")]
    return sorted(found, key=lambda finding: -finding.cost)


def prefill(interval: Interval) -> Iterator[Finding]:
    """Find workers at which prompts wait for other prompts."""
    for worker in interval.workers():
        prompts, share = worker.mean("load.prompts"), 1 - worker.decode_share
        wants_room = worker.blocked > 0.5
        if worker.busy < BUSY or share < 0.5 or prompts < WAITING_PROMPTS or wants_room:
            continue
        rate = worker.gained("computed_tokens_total") / interval.seconds
        alone = worker.after.load.purpose == "prefill"
        yield Finding(
            "prefill",
            prompts,
            f"{worker.after.id} computes {rate:.0f} tokens a second and {prompts:.1f} prompts wait for it",
            MORE_PREFILL + (", or give them a faster device" if alone else ", or raise --itl-budget"),
            worker.after.id,
            {"busy": worker.busy, "prompts": prompts, "tokens_per_s": rate, "prefill_share": share},
        )


def decode(interval: Interval) -> Iterator[Finding]:
    """Find workers whose batches slow each request down, by the cost model's step times."""
    for worker in interval.workers():
        running, costs = worker.mean("state.num_running"), worker.after.state.costs
        share = worker.decode_share
        if worker.busy < BUSY or share < 0.5 or running <= 1:
            continue
        step_s = costs.decode_s(running, worker.running_context)
        alone_s = costs.decode_s(1, worker.running_context / running)
        slower = step_s / alone_s if alone_s > 0 else 1.0
        if slower < SLOWED:
            continue
        yield Finding(
            "decode",
            running * (1 - 1 / slower),
            f"{worker.after.id} decodes {running:.0f} requests at once: a step takes {step_s * 1e3:.1f} ms, "
            f"alone {alone_s * 1e3:.1f} ms",
            MORE_DECODE + ", or lower --max-num-seqs for fewer, faster streams",
            worker.after.id,
            {"busy": worker.busy, "running": running, "step_s": step_s, "alone_step_s": alone_s},
        )


def transfer(interval: Interval) -> Iterator[Finding]:
    """Find hand-offs whose blocks are still being sent after the prefill."""
    exposed_s = interval.mean_s("request_kv_transfer_exposed_time_seconds")
    prefill_s = interval.mean_s("request_prefill_time_seconds")
    whole_s = exposed_s + prefill_s
    pairs = [
        (worker.sent(pair.peer, "busy_seconds") - worker.sent(pair.peer, "hidden_seconds"), worker, pair)
        for worker in interval.workers()
        for pair in worker.after.state.pairs
        if pair.in_use
    ]
    if exposed_s < max(EXPOSED_S, EXPOSED_SHARE * whole_s) or not pairs:
        return
    wait_s, worker, pair = max(pairs, key=lambda each: each[0])
    change = "connect the workers faster, or serve without hand-offs (--no-disaggregation)"
    if pair.transport == "tcp":
        change = "halve the bytes (--kv-wire-dtype int8), use more streams (--kv-tcp-streams), or " + change
    yield Finding(
        "transfer",
        interval.total("request_kv_transfer_exposed_time_seconds_sum") / interval.seconds,
        f"after their prompt is computed requests wait {exposed_s:.3f} s for their KV; "
        f"{worker.after.id} sends to {pair.peer} over {pair.transport}",
        change,
        worker.after.id,
        {
            "exposed_s": exposed_s,
            "prefill_s": prefill_s,
            "bytes_per_s": worker.sent(pair.peer, "bytes") / interval.seconds,
            "exposed_share": min(wait_s / interval.seconds, 1.0),
        },
    )


def router(interval: Interval) -> Iterator[Finding]:
    """Find a router whose event loop delays messages."""
    names = ("router_cpu_seconds_total", "router_core_wait_seconds_total")
    busy = sum(map(interval.total, names)) / interval.seconds
    lag_s = interval.mean_s("router_loop_lag_seconds")
    if busy < ROUTER_BUSY and (lag_s < ROUTER_LAG_S or busy < ROUTER_BUSY / 2):
        return
    live = (interval.before.live + interval.after.live) / 2
    tokens = interval.total("generation_tokens_total") / interval.seconds
    yield Finding(
        "router",
        live * min(busy, 1.0),
        f"the router is busy, or waits for a core, {busy:.0%} of the time for {tokens:.0f} tokens a second; "
        f"it is {lag_s * 1e3:.1f} ms late",
        "add routers (--router-replicas), or ask for fewer log-probabilities and fewer streams",
        None,
        {"busy": busy, "lag_s": lag_s, "tokens_per_s": tokens, "requests": live},
    )


def kv_room(interval: Interval) -> Iterator[Finding]:
    """Find workers at which requests wait for KV blocks or are preempted."""
    for worker in interval.workers():
        load = worker.after.load
        reserved_s = worker.gained("reservation_wait_seconds_total")
        preempted = worker.after.state.num_preemptions - worker.before.state.num_preemptions
        waiting = worker.mean("state.num_waiting") * worker.blocked
        cost = waiting + reserved_s / interval.seconds + preempted / interval.seconds
        if cost < LEAST_COST:
            continue
        yield Finding(
            "kv_room",
            cost,
            f"{load.worker_id} uses {load.kv_usage:.0%} of {load.kv_tokens:.0f} tokens of KV: requests wait "
            f"for blocks {worker.blocked:.0%} of the time, {preempted / interval.seconds:.1f} a second lose "
            "theirs",
            "give the pool more memory (--kv-cache-memory-bytes, --gpu-memory-utilization), keep evicted "
            "blocks on the host (--kv-offloading-size), or " + MORE_DECODE,
            load.worker_id,
            {
                "kv_usage": load.kv_usage,
                "blocked_share": worker.blocked,
                "reservation_wait_s": reserved_s,
                "preemptions_per_s": preempted / interval.seconds,
            },
        )


_REFUSALS = {
    "queue_full": "raise --max-queued-requests, or add workers",
    "shed": "raise --max-queued-requests, or add workers",
    "slo_ttft": "raise --slo-ttft or x-slo-ttft-ms, or " + MORE_PREFILL,
    "slo_tpot": "raise --slo-tpot or x-slo-tpot-ms, or " + MORE_DECODE,
    "no_worker": "see why no worker is ready: tandem status",
}


def queue(interval: Interval) -> Iterator[Finding]:
    """Find requests that are refused, or wait for a worker or a row of a batch."""
    request_s = interval.mean_s("e2e_request_latency_seconds") or 1.0
    before, after = interval.before, interval.after
    for reason, count in after.refused.items():
        rate = max(count - before.refused.get(reason, 0.0), 0.0) / interval.seconds
        if rate > 0:
            change = _REFUSALS.get(reason, "add workers")
            summary = f"{rate:.1f} requests a second are refused ({reason})"
            yield Finding("queue", rate * request_s, summary, change, None, {"refused_per_s": rate})
    parked = (before.parked + after.parked) / 2
    if parked:
        summary = f"{parked:g} requests wait for a worker to start"
        yield Finding("queue", parked, summary, _REFUSALS["no_worker"], None, {"parked": parked})
    for worker in interval.workers():
        running, limit = worker.mean("state.num_running"), after.max_num_seqs
        waiting = worker.mean("state.num_waiting") + worker.mean("held")
        always_running = min(worker.before.state.num_running, worker.after.state.num_running)
        full = 0 < limit <= always_running
        if full and waiting > 0:
            summary = f"{worker.after.id} decodes --max-num-seqs={limit} requests, and {waiting:g} more wait"
            change = "raise --max-num-seqs, or " + MORE_DECODE
            figures = {"running": running, "waiting": waiting}
            yield Finding("queue", waiting, summary, change, worker.after.id, figures)


def draft(interval: Interval) -> Iterator[Finding]:
    """Find workers that would gain more tokens a second without drafts."""
    for worker in interval.workers():
        steps = worker.gained('spec_decode_steps_total{drafts="yes"}')
        drafts = worker.gained("spec_decode_num_drafts_total")
        if steps <= 0 or drafts <= 0:
            continue
        spent_s = worker.gained("spec_decode_draft_seconds_total")
        spent_s += worker.gained("spec_decode_verify_seconds_total")
        accepted = worker.gained("spec_decode_num_accepted_tokens_total")
        drafted = worker.gained("spec_decode_num_draft_tokens_total")
        tau, rows = 1 + accepted / drafts, drafts / steps
        known = worker.after.state.speculation or SpeculationState()
        costs = worker.after.state.costs
        plain_s = StepCurve(rows, known.step_time, costs, worker.running_context).seconds(0)
        gain = tau * plain_s / (spent_s / steps)
        if gain > 1 - DRAFT_LOSS:
            continue
        yield Finding(
            "draft",
            rows * (1 - gain) * min(spent_s / interval.seconds, 1.0),
            f"{worker.after.id} drafts {drafted / drafts:.1f} tokens a step and "
            f"{accepted / max(drafted, 1):.0%} are accepted: that brings {gain:.2f} times the tokens of none",
            'draft fewer tokens or as many as pay ("num_speculative_tokens": "auto" in '
            "--speculative-config), or use a draft that is closer to the model",
            worker.after.id,
            {"gain": gain, "tau": tau, "drafted_per_step": drafted / drafts, "step_s": spent_s / steps}
            | {"plain_step_s": plain_s, "acceptance": accepted / max(drafted, 1)},
        )


def _sum(counters: dict[str, float], name: str) -> float:
    """Sum a counter over its labels. Workers name counters `name` or `name{label="value"}`."""
    return sum(value for key, value in counters.items() if key == name or key.startswith(name + "{"))


Verdict = Callable[[Interval], Iterator[Finding]]
VERDICTS: tuple[Verdict, ...] = (prefill, decode, transfer, router, kv_room, queue, draft)
