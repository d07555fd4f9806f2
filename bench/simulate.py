"""`tandem bench simulate`: goodput over the rate of requests, whole and split, on simulated H100s.

The router's own placement and the engine's own scheduler serve random requests on a virtual clock, as in
`tandem plan`. The first part raises the rate at one SLO. The second finds, for each limit on the time per
token, the highest rate of which nine tenths of the requests keep the SLO.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import ceil, sqrt
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import typer

from bench.report import RESULTS, made_by, markdown_table, publish
from planner.profile import DEFAULT_PROFILE, Profile, read_profile
from planner.trace import TRACE_BLOCK_TOKENS, TraceRequest

ATTAINMENT = 0.9
SLO_TTFT_S = 1.0
LAYOUTS: Mapping[str, tuple[Literal["colocated", "disaggregated", "conditional"], int, int]] = {
    "whole": ("colocated", 0, 4),
    "split": ("disaggregated", 2, 2),
    "cost": ("conditional", 2, 2),
}
"""The arguments of each layout's `planner.scenarios.Scenario`."""
LIMITS_S = (0.008, 0.01, 0.015, 0.02, 0.03)
RATES = (4.0, 8.0, 12.0, 16.0, 20.0, 24.0, 32.0)
HALVINGS = 5
SLOWEST, FASTEST = 1.0, 64.0


@dataclass(frozen=True)
class Load:
    """Requests with prompts of `shortest` to `longest` tokens, which share nothing, and equal answers."""

    name: str
    shortest: int
    longest: int
    answer: int

    def requests(self, rate: float, count: int) -> list[TraceRequest]:
        """Return requests that arrive at random (Poisson), the same at each call but for the pace."""
        draw, now, blocks = random.Random(0), 0.0, 0
        made = []
        for _ in range(count):
            now += draw.expovariate(1.0) / rate
            length = draw.randint(self.shortest, self.longest)
            own = ceil(length / TRACE_BLOCK_TOKENS)
            made.append(TraceRequest(now, length, self.answer, range(blocks, blocks + own)))
            blocks += own
        return made


SUMMARIES, CHATS = Load("summaries", 1500, 4000, 128), Load("chats", 200, 800, 256)


class Point(msgspec.Struct, frozen=True):
    """The outcome of one rate, in requests a second; `limit_s` is the SLO's on the time per token."""

    load: str
    layout: str
    limit_s: float
    rate: float
    attainment: float
    ttft_p90: float
    tpot_p90: float

    @property
    def goodput(self) -> float:
        return self.rate * self.attainment


class Highest(msgspec.Struct, frozen=True):
    """The highest rate that keeps the SLO."""

    load: str
    layout: str
    limit_s: float
    rate: float


@dataclass(frozen=True)
class Simulation:
    profile: Profile
    count: int

    def point(self, load: Load, layout: str, limit_s: float, rate: float) -> Point:
        from planner.scenarios import Scenario, Slo, Study  # imports torch

        slo = Slo(SLO_TTFT_S, limit_s)
        study = Study(self.profile, load.requests(rate, self.count), TRACE_BLOCK_TOKENS, slo)
        found = study.outcome(Scenario(*LAYOUTS[layout]))
        return Point(load.name, layout, limit_s, rate, found.attainment, found.ttft.p90, found.tpot.p90)

    def over_rates(self, load: Load, limit_s: float) -> Iterator[Point]:
        for layout in LAYOUTS:
            for rate in RATES:
                yield self.point(load, layout, limit_s, rate)

    def highest(self, load: Load, layout: str, limit_s: float) -> Highest:
        """Search between the slowest and the fastest rate; 0 if even the slowest misses the SLO."""
        low, high = SLOWEST, FASTEST
        if self.point(load, layout, limit_s, low).attainment < ATTAINMENT:
            return Highest(load.name, layout, limit_s, 0.0)
        for _ in range(HALVINGS):
            rate = sqrt(low * high)
            if self.point(load, layout, limit_s, rate).attainment >= ATTAINMENT:
                low = rate
            else:
                high = rate
        return Highest(load.name, layout, limit_s, low)


def report(points: list[Point], rates: list[Highest]) -> str:
    found = {(each.load, each.layout, each.limit_s): each.rate for each in rates}
    rows = [
        (load.name, f"{limit_s * 1e3:g}", *(f"{found[load.name, layout, limit_s]:.1f}" for layout in LAYOUTS))
        for load in (SUMMARIES, CHATS)
        for limit_s in LIMITS_S
    ]
    times = [(f"{each.ttft_p90:.2f}", f"{each.tpot_p90 * 1e3:.1f}") for each in points]
    over = [
        (each.layout, f"{each.rate:g}", f"{each.goodput:.1f}", *of)
        for each, of in zip(points, times, strict=True)
    ]
    head = ("layout", "requests/s", "within the SLO", "TTFT p90, s", "TPOT p90, ms")
    return "\n\n".join(
        (
            "# Goodput over rate, simulated",
            made_by(),
            "Four H100s with Llama 3.1 8B: whole; two prefill and two decode workers; or placed by `cost`.",
            "Highest rate (requests a second) of which 90 % keep the SLO: 1 s to the first token, and this:",
            markdown_table(("load", "ms a token", *LAYOUTS), rows),
            f"Summaries at {points[0].limit_s * 1e3:g} ms a token:",
            markdown_table(head, over) + "\n",
        )
    )


def main(
    count: Annotated[int, typer.Option(min=2, help="requests at each rate")] = 600,
    output: Annotated[Path, typer.Option(help="folder for the results")] = RESULTS / "simulate",
) -> None:
    """Simulate goodput over the rate of requests, whole and split, on H100s."""
    simulation = Simulation(read_profile(DEFAULT_PROFILE), count)
    points = list(simulation.over_rates(SUMMARIES, LIMITS_S[1]))
    rates = [
        simulation.highest(load, layout, limit_s)
        for load in (SUMMARIES, CHATS)
        for layout in LAYOUTS
        for limit_s in LIMITS_S
    ]
    content = {"count": count, "points": points, "highest": rates}
    publish(output, msgspec.to_builtins(content), report(points, rates))
