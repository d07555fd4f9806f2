"""`tandem bench regret`: the first system's loss against each other one, workload by workload.

The systems run side by side and take turns at each workload, so that changes of the machine's speed affect
all of them alike. A request is good if it meets its TTFT objective, a multiple of the time of a lone request,
and takes at most `TPOT_FACTOR` times the lone request's time per token. The regret is the lowest ratio of the
first system to any other one on each figure, each ratio a median over the rounds; below 1 the first is worse.
"""

from __future__ import annotations

import asyncio
import itertools
import statistics
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np
import typer
from rich.table import Table

from bench import turns
from bench.options import chosen
from bench.peers.setup import DEFAULT_ENV_DIR
from bench.peers.systems import System, SystemSettings, labels_of, vocab_size_of
from bench.regret.workloads import ALONE_INPUT_LEN, ALONE_OUTPUT_LEN, WORKLOADS, Chain, Draw
from bench.report import RESULTS, publish, show, terminal_table
from bench.serve.client import Client, Record, ServerTarget
from bench.serve.runner import run_on_fast_loop
from bench.serve.statistics import latencies, meets

TPOT_FACTOR = 4.0
ALONE_REQUESTS = 5
MODES = ["cost=tandem", "whole=tandem-colocated", "split=tandem --placement least_loaded"]
Answers = list[tuple[Chain, list[Record]]]


class TurnFigures(msgspec.Struct, frozen=True):
    """One workload's figures in one turn. `goodput` is in requests per second, the others are seconds."""

    system: str
    workload: str
    round: int
    goodput: float
    ttft_p50: float
    ttft_p99: float
    gap_p99: float


FIGURES = ("goodput", "ttft_p50", "ttft_p99", "gap_p99")


@dataclass
class Measurement:
    """Measures one workload after the other. The unit of time is measured once, on the first system."""

    seconds: float
    load: float
    vocab_size: int
    seed: int
    alone: tuple[float, float] | None = None
    """Seconds of a lone request, and seconds of each of its tokens after the first."""

    def warm_up(self, system: System) -> None:
        alone = run_on_fast_loop(self._alone(_client(system)))
        self.alone = self.alone or alone

    def measure(self, system: System, workload: str, number: int) -> TurnFigures:
        assert self.alone, "warm up first"
        unit, tpot_s = self.alone
        rng = np.random.default_rng([self.seed, number, list(WORKLOADS).index(workload)])
        chains = WORKLOADS[workload](Draw(rng, self.vocab_size, self.seconds, unit / self.load))
        began = time.perf_counter()
        answers = run_on_fast_loop(_run(_client(system), chains, self.seconds))
        seconds = max(self.seconds, time.perf_counter() - began)
        figures = judged(answers, seconds, unit, tpot_s * TPOT_FACTOR)
        return TurnFigures(system.label, workload, number, **figures)

    async def _alone(self, client: Client) -> tuple[float, float]:
        """Return the medians of lone requests."""
        draw = Draw(np.random.default_rng(self.seed), self.vocab_size, 0.0, 1.0)
        taken = []
        for _ in range(ALONE_REQUESTS):
            record = _checked(await client.send(draw.random(ALONE_INPUT_LEN, ALONE_OUTPUT_LEN)))
            taken.append(latencies(record))
        whole_s, token_s = (statistics.median(each[name] for each in taken) for name in ("e2el", "tpot"))
        return whole_s, token_s


def _client(system: System) -> Client:
    return Client(ServerTarget(system.base_url, system.model, ignore_eos=True))


def _checked(record: Record) -> Record:
    if record.error:
        raise RuntimeError(f"{record.error}: {record.detail}")
    return record


async def _run(client: Client, chains: Sequence[Chain], seconds: float) -> Answers:
    """Run the chains at once. Raises RuntimeError if a request fails."""
    began = time.perf_counter()

    async def follow(chain: Chain) -> tuple[Chain, list[Record]]:
        await asyncio.sleep(began + chain.start - time.perf_counter())
        records = []
        for request in chain.requests:
            records.append(_checked(await client.send(request)))
            if time.perf_counter() > began + seconds:
                break
        return chain, records

    return list(await asyncio.gather(*map(follow, chains)))


def judged(answers: Answers, seconds: float, unit: float, slo_tpot: float) -> dict[str, float]:
    """Return the figures of a workload's answers."""
    good, ttfts, gaps = 0, [], []
    for chain, records in answers:
        taken = [latencies(record) for record in records]
        good += sum(meets(each, {"ttft": chain.patience * unit, "tpot": slo_tpot}) for each in taken)
        ttfts += [each["ttft"] for each in taken if chain.has_ttft]
        gaps += [np.diff(record.token_times) for record in records if chain.has_gaps]
    p50, p99 = np.percentile(ttfts or [0.0], (50, 99)).tolist()
    all_gaps = np.concatenate([*gaps, [0.0]])
    return {
        "goodput": good / seconds,
        "ttft_p50": p50,
        "ttft_p99": p99,
        "gap_p99": float(np.percentile(all_gaps, 99)),
    }


def regrets(found: Sequence[TurnFigures], first: str, workload: str) -> dict[str, float | None]:
    """Return the lowest ratio of the first system to any other one by figure. A ratio is a median over the
    rounds: the best of several systems that are equal but for noise would always seem better.
    """
    by_system: dict[str, dict[int, TurnFigures]] = {}
    for each in found:
        if each.workload == workload:
            by_system.setdefault(each.system, {})[each.round] = each
    ours = by_system.pop(first, {})
    lowest: dict[str, float | None] = {}
    for name in FIGURES:
        pairs = [(other, ours) if name == "goodput" else (ours, other) for other in by_system.values()]
        ratios = [turns.ratio_to(base, better, attrgetter(name)) for base, better in pairs]
        lowest[name] = min((ratio for ratio in ratios if ratio is not None), default=None)
    return lowest


def as_table(found: Sequence[TurnFigures], first: str) -> Table:
    rows = []
    for workload in dict.fromkeys(each.workload for each in found):
        regret = regrets(found, first, workload)
        for system in dict.fromkeys(each.system for each in found):
            of_system = [each for each in found if (each.system, each.workload) == (system, workload)]
            row = [workload if system == first else "", system]
            for name in FIGURES if of_system else ():
                value = float(np.median([getattr(each, name) for each in of_system]))
                shown = f"{value:.2f}" if name == "goodput" else f"{value * 1e3:.0f}"
                ratio = regret[name]
                row.append(shown if system != first or ratio is None else f"{shown} ({ratio:.2f})")
            rows.append(row)
    head = ("workload", "system", "goodput, 1/s", "TTFT p50, ms", "TTFT p99, ms", "gap p99, ms")
    title = "medians over the rounds; in brackets the lowest ratio to another system, below 1 is worse"
    return terminal_table(title, head, rows)


def regret(
    model: turns.ModelOption,
    system: turns.SystemOption = MODES,
    workload: Annotated[str, typer.Option(help=f"of {', '.join(WORKLOADS)}")] = ",".join(WORKLOADS),
    load: Annotated[float, typer.Option(min=0.01, help="factor on the rates of all workloads")] = 1.0,
    seconds: Annotated[float, typer.Option(min=0.5, help="of each workload")] = 8.0,
    rounds: turns.RoundsOption = 3,
    seed: Annotated[int, typer.Option(min=0, help="of prompts and arrivals")] = 0,
    env_dir: turns.EnvDirOption = DEFAULT_ENV_DIR,
    output: Annotated[Path, typer.Option(help="folder for the figures")] = RESULTS / "regret",
) -> None:
    """Measure what the first system loses to each of the others on twelve workloads, in turns."""
    names = chosen("--workload", workload, list(WORKLOADS))
    setting = SystemSettings(model.resolve(), env_dir.resolve(), max_model_len=4096)
    labels = labels_of(system, setting)
    measurement = Measurement(seconds, load, vocab_size_of(model), seed)
    found = []
    with ExitStack() as stack:
        systems = turns.start_all(system, setting, stack)
        for each in systems:
            measurement.warm_up(each)
        for number, name in itertools.product(range(rounds), names):
            for each in turns.in_round(systems, number):
                found.append(measurement.measure(each, name, number))
                show(f"round {number}, {found[-1]}")
    content = {"alone": measurement.alone, "measurements": msgspec.to_builtins(found)}
    publish(output, content, as_table(found, labels[0]))
