"""Layouts of a number of workers, and the outcome of a trace's requests in each."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from math import inf
from multiprocessing import get_context
from typing import Literal

import msgspec
import numpy as np

from planner.cluster import ClusterLayout, SimulatedCluster, SimulatedRequest
from planner.engine import longest_sequence
from planner.profile import Profile
from planner.trace import TraceRequest
from protocol.errors import ConfigError
from router.placement import placement_policy

Mode = Literal["colocated", "disaggregated", "conditional"]

FEW = 1000
"""Number of requests that are simulated in a second, about as long as starting more processes takes."""
LEAST_GAIN = 0.01
"""Share of goodput below which layouts count as equal."""


class Slo(msgspec.Struct, frozen=True):
    """The SLO: seconds to the first token, and between two tokens."""

    ttft_s: float
    tpot_s: float


class Scenario(msgspec.Struct, frozen=True):
    """A layout with the policy `placement`. `colocated`: workers serve whole requests. `disaggregated`: every
    request is split. `conditional`: the policy `cost` splits a request if that is predicted to cost less.

    If all requests are split, the policy `cost` chooses only the prefill worker.
    """

    mode: Mode
    prefill: int
    decode: int
    placement: str = "cost"

    @property
    def flags(self) -> str:
        """Return the options of `tandem serve` for this layout."""
        if self.mode == "colocated":
            return f"--no-disaggregation --decode-replicas {self.decode}"
        workers = f"--prefill-replicas {self.prefill} --decode-replicas {self.decode}"
        return workers if self.mode == "conditional" else f"{workers} --decode-placement least_loaded"

    def layout(self, slo: Slo) -> ClusterLayout:
        is_apart = self.mode == "disaggregated" and self.placement == "cost"
        policy = placement_policy(self.placement, decode="least_loaded" if is_apart else None)
        return ClusterLayout(
            self.prefill, self.decode, policy, self.mode != "colocated", slo.ttft_s, slo.tpot_s
        )


class Spread(msgspec.Struct, frozen=True):
    """Percentiles of a time, in seconds."""

    p50: float
    p90: float
    p99: float


class PlanOutcome(msgspec.Struct, frozen=True):
    """The outcome of a trace's requests.

    `attainment` is the share of all requests that met the SLO, `goodput` the number per second of the trace,
    `worker_hours` the time that 1,000 of them took. `ttft` and `tpot` are of requests that were not refused.
    `mean_rows` is a worker's mean batch while it decodes.
    """

    scenario: Scenario
    requests: int
    good: int
    refused: int
    split: int
    goodput: float
    worker_hours: float
    ttft: Spread
    tpot: Spread
    mean_rows: float

    @property
    def attainment(self) -> float:
        return self.good / self.requests


def scenarios(workers: int) -> list[Scenario]:
    splits = [(prefill, workers - prefill) for prefill in range(1, workers)]
    modes: tuple[Mode, ...] = ("disaggregated", "conditional")
    return [
        Scenario("colocated", 0, workers),
        *(Scenario(mode, *split) for mode in modes for split in splits),
    ]


@dataclass(frozen=True)
class Study:
    """A trace on workers of one profile; blocks of the trace have `block_tokens` tokens."""

    profile: Profile
    requests: Sequence[TraceRequest]
    block_tokens: int
    slo: Slo

    def __post_init__(self) -> None:
        """Check the trace. Raises `ConfigError` for requests that no worker has room for."""
        longest = max(request.input_len + request.output_len for request in self.requests)
        room = longest_sequence(self.profile)
        if longest > room:
            raise ConfigError(
                f"--trace: its longest request has {longest} tokens, a worker of the profile "
                f"{self.profile.name} has room for {room}: cut it with --max-input-len"
            )

    def outcome(self, scenario: Scenario) -> PlanOutcome:
        requests, cluster = self.run(scenario.layout(self.slo))
        served = [request for request in requests if not request.is_refused]
        good = sum(self.is_good(request) for request in served)
        seconds = max(requests[-1].trace.arrival, 1e-9)
        engines = [worker.engine for worker in cluster.workers.values()]
        decode_s = sum(engine.decode_s for engine in engines)
        hours = (scenario.prefill + scenario.decode) * seconds / 3600
        return PlanOutcome(
            scenario=scenario,
            requests=len(requests),
            good=good,
            refused=len(requests) - len(served),
            split=sum(request.was_split for request in served),
            goodput=good / seconds,
            worker_hours=hours / good * 1000 if good else inf,
            ttft=_spread([request.ttft_s for request in served]),
            tpot=_spread([request.tpot_s for request in served if request.trace.output_len > 1]),
            mean_rows=sum(engine.row_seconds for engine in engines) / decode_s if decode_s else 0.0,
        )

    def run(self, layout: ClusterLayout) -> tuple[list[SimulatedRequest], SimulatedCluster]:
        requests = [SimulatedRequest(request, self.block_tokens) for request in self.requests]
        cluster = SimulatedCluster(layout, self.profile)
        collects = gc.isenabled()
        gc.disable()  # its scans of all simulated blocks would take a third of the time
        try:
            cluster.run(requests)
        finally:
            if collects:
                gc.enable()
        return requests, cluster

    def is_good(self, request: SimulatedRequest) -> bool:
        return request.ttft_s <= self.slo.ttft_s and request.tpot_s <= self.slo.tpot_s

    def outcomes(self, chosen: Sequence[Scenario]) -> Iterator[PlanOutcome]:
        """Yield the outcome of each scenario when it is done. Use all cores if the simulation is long."""
        cores = min(len(os.sched_getaffinity(0)), len(chosen))
        if cores == 1 or len(self.requests) * len(chosen) < FEW:
            yield from map(self.outcome, chosen)
            return
        with ProcessPoolExecutor(cores, get_context("spawn"), _begin, (self,)) as pool:
            for future in as_completed([pool.submit(_outcome, scenario) for scenario in chosen]):
                yield future.result()


def best(outcomes: Sequence[PlanOutcome]) -> PlanOutcome:
    """Return the outcome with the highest goodput; among equals, with the shortest times to first tokens."""
    least = (1 - LEAST_GAIN) * max(outcome.good for outcome in outcomes)
    return min((each for each in outcomes if each.good >= least), key=lambda each: each.ttft.p90)


_study: Study
"""The study that a process of the pool simulates."""


def _begin(study: Study) -> None:
    global _study
    _study = study


def _outcome(scenario: Scenario) -> PlanOutcome:
    return _study.outcome(scenario)


def _spread(seconds: Sequence[float]) -> Spread:
    return Spread(*np.percentile(seconds, (50, 90, 99)).tolist()) if seconds else Spread(inf, inf, inf)
