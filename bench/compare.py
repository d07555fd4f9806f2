"""Runs several servers under the same loads, interleaved (A B A B), and reports medians and ratios.

Each round starts a system, warms it up, measures every concurrency, and stops it before the next system
starts: an idle server that polls would take cores from the server under measurement. Within a round all
systems get the same prompts; rounds get different prompts, so no prefix cache answers from an earlier round.
Ratios are taken within a round, then their median over the rounds, which cancels changes between rounds.
"""

import json
import os
import shlex
import signal
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from bench.peers.process import RunningSystem
from bench.peers.setup import DEFAULT_ENV_DIR
from bench.peers.systems import SYSTEMS, Setting, System, parse_system
from bench.record import RESULTS, write_results
from bench.serve.client import ServerTarget
from bench.serve.load import WARMUP_SEED, Load
from bench.serve.runner import run_load
from bench.serve.statistics import Summary
from bench.serve.workload import LoadRequest, synthetic

WARMUP_OUTPUT_LEN = 32


class SystemMeasurement(msgspec.Struct, frozen=True):
    """One system under one load in one round. `load_average` (1 minute) tells how busy the machine was."""

    system: str
    round: int
    concurrency: int
    summary: Summary
    client_cpu: float
    load_average: float


@dataclass(frozen=True, slots=True)
class ComparisonPlan:
    """Systems, loads and rounds of a comparison."""

    specs: Sequence[str]
    setting: Setting
    concurrencies: Sequence[int]
    rounds: int
    input_len: int
    output_len: int
    waves: int
    vocab_size: int
    seed: int
    start_timeout: float
    log_dir: Path

    def requests(self, number: int, concurrency: int) -> list[LoadRequest]:
        """Return the load of one round: `waves` times the concurrency, but at least 4 requests."""
        seed = self.seed + 1000 * number + concurrency
        count = max(4, self.waves * concurrency)
        load = Load(count, self.input_len, self.output_len, vocab_size=self.vocab_size, seed=seed)
        return load.requests()

    def warmups(self, concurrency: int) -> list[LoadRequest]:
        """Return as many requests as will be measured at once, so that nothing is compiled during the
        measurement.
        """
        seed = WARMUP_SEED - concurrency
        return synthetic(concurrency, self.input_len, WARMUP_OUTPUT_LEN, self.vocab_size, seed)


def measure_system(
    plan: ComparisonPlan, system: System, number: int, console: Console
) -> list[SystemMeasurement]:
    """Start one system, measure every concurrency, stop it.

    Raises RuntimeError if it does not start or does not answer.
    """
    measurements = []
    target = ServerTarget(system.base_url, system.model, ignore_eos=True)
    with RunningSystem(
        system.commands, plan.log_dir / f"round-{number}" / slug(system.label), plan.start_timeout
    ):
        for concurrency in plan.concurrencies:
            result = run_load(
                target, plan.requests(number, concurrency), concurrency, warmups=plan.warmups(concurrency)
            )
            measurement = SystemMeasurement(
                system.label, number, concurrency, result.summary, result.client_cpu, os.getloadavg()[0]
            )
            console.print(describe(measurement), highlight=False, soft_wrap=True)
            measurements.append(measurement)
    return measurements


def describe(measurement: SystemMeasurement) -> str:
    """Return one line about a measurement."""
    summary = measurement.summary
    failed = f", {summary.failed} failed: {summary.errors}" if summary.failed else ""
    return (
        f"round {measurement.round}, {measurement.system}, concurrency {measurement.concurrency}: "
        f"{summary.output_throughput:.1f} tok/s, TTFT p50 {summary.ttft.p50 * 1e3:.1f} ms, "
        f"TPOT p50 {summary.tpot.p50 * 1e3:.2f} ms, load {measurement.load_average:.1f}{failed}"
    )


def run_plan(plan: ComparisonPlan, console: Console) -> list[SystemMeasurement]:
    """Measure all systems, round by round. A system that fails is reported and left out of its round."""
    measurements: list[SystemMeasurement] = []
    for number in range(plan.rounds):
        for spec in plan.specs:
            system = parse_system(spec, plan.setting)
            try:
                measurements += measure_system(plan, system, number, console)
            except RuntimeError as error:
                console.print(f"[red]round {number}, {system.label}[/red]: {error}", highlight=False)
    return measurements


class Comparison(msgspec.Struct, frozen=True):
    """Medians of one system at one concurrency, and their ratios to the first system in the same rounds."""

    system: str
    concurrency: int
    rounds: int
    output_throughput: float
    ttft_p50: float
    tpot_p50: float
    failed: int
    throughput_ratio: float | None
    ttft_ratio: float | None


def compare(measurements: Sequence[SystemMeasurement]) -> list[Comparison]:
    """Return the medians over the rounds for each system and concurrency, in the order of their first
    measurement.
    """
    by_key: dict[tuple[int, str], dict[int, Summary]] = {}
    for m in measurements:
        by_key.setdefault((m.concurrency, m.system), {})[m.round] = m.summary
    if not measurements:
        return []
    baseline = measurements[0].system
    comparisons = []
    for (concurrency, system), rounds in sorted(by_key.items(), key=lambda item: item[0][0]):
        base = by_key.get((concurrency, baseline), {})
        shared = [(rounds[n], base[n]) for n in rounds if n in base and system != baseline]
        comparisons.append(
            Comparison(
                system,
                concurrency,
                len(rounds),
                statistics.median(s.output_throughput for s in rounds.values()),
                statistics.median(s.ttft.p50 for s in rounds.values()),
                statistics.median(s.tpot.p50 for s in rounds.values()),
                sum(s.failed for s in rounds.values()),
                _median_ratio([(mine.output_throughput, its.output_throughput) for mine, its in shared]),
                _median_ratio([(mine.ttft.p50, its.ttft.p50) for mine, its in shared]),
            )
        )
    return comparisons


def _median_ratio(pairs: Sequence[tuple[float, float]]) -> float | None:
    ratios = [mine / its for mine, its in pairs if its > 0]
    return statistics.median(ratios) if ratios else None


def as_table(comparisons: Sequence[Comparison]) -> Table:
    """Return a table of the medians and their ratios to the first system."""
    table = Table(title="medians over the rounds; ratios against the first system", title_justify="left")
    for column in (
        "concurrency",
        "system",
        "rounds",
        "out tok/s",
        "ratio",
        "TTFT ms",
        "ratio",
        "TPOT ms",
        "failed",
    ):
        table.add_column(column, justify="left" if column == "system" else "right")
    last = None
    for c in comparisons:
        if last not in (None, c.concurrency):
            table.add_section()
        last = c.concurrency
        table.add_row(
            str(c.concurrency),
            c.system,
            str(c.rounds),
            f"{c.output_throughput:.1f}",
            _ratio(c.throughput_ratio),
            f"{c.ttft_p50 * 1e3:.1f}",
            _ratio(c.ttft_ratio),
            f"{c.tpot_p50 * 1e3:.2f}",
            str(c.failed),
        )
    return table


def _ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}x"


def slug(label: str) -> str:
    """Turn a label into a file name."""
    return "".join(c if c.isalnum() or c in "-._" else "-" for c in label)


def vocab_size_of(model: Path) -> int:
    """Return the vocabulary size from a model folder's configuration."""
    return int(json.loads((model / "config.json").read_text())["vocab_size"])


def contents(plan: ComparisonPlan, measurements: Sequence[SystemMeasurement]) -> dict[str, Any]:
    """Return the plan, every measurement and the medians as JSON content."""
    return {
        "model": plan.setting.model.name,
        "load": {
            "input_len": plan.input_len,
            "output_len": plan.output_len,
            "waves": plan.waves,
            "seed": plan.seed,
        },
        "systems": list(plan.specs),
        "medians": msgspec.to_builtins(compare(measurements)),
        "measurements": msgspec.to_builtins(measurements),
    }


def _leave(number: int, frame: FrameType | None) -> None:
    signal.signal(number, signal.SIG_IGN)  # a second signal would interrupt the shutdown of the servers
    sys.exit(128 + number)


def main(
    model: Annotated[Path, typer.Option(exists=True, file_okay=False, help="local model folder")],
    system: Annotated[list[str], typer.Option(help=f"[label=]name [flags] or URL; {', '.join(SYSTEMS)}")],
    concurrency: Annotated[str, typer.Option(help="comma-separated")] = "1,4,16",
    rounds: Annotated[int, typer.Option(min=1)] = 3,
    input_len: Annotated[int, typer.Option(min=1, help="random tokens per prompt")] = 256,
    output_len: Annotated[int, typer.Option(min=1, help="tokens generated")] = 128,
    waves: Annotated[int, typer.Option(min=1, help="requests: waves x concurrency, 4 at least")] = 4,
    threads: Annotated[int, typer.Option(min=1, help="cores for each system")] = os.cpu_count() or 1,
    max_model_len: Annotated[int, typer.Option(min=1)] = 2048,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    start_timeout: Annotated[float, typer.Option(help="seconds for a system to start")] = 600.0,
    env_dir: Annotated[Path, typer.Option(help="the peers' environments")] = DEFAULT_ENV_DIR,
    output: Annotated[Path | None, typer.Option(help="folder [default: one in bench/results/]")] = None,
) -> None:
    """Measure several systems under the same load, interleaved, and compare them with the first."""
    signal.signal(signal.SIGTERM, _leave)
    stamp = time.strftime("%Y%m%d-%H%M%S")
    plan = ComparisonPlan(
        specs=system,
        setting=Setting(model.resolve(), env_dir.expanduser().resolve(), max_model_len, threads=threads),
        concurrencies=[int(part) for part in concurrency.split(",")],
        rounds=rounds,
        input_len=input_len,
        output_len=output_len,
        waves=waves,
        vocab_size=vocab_size_of(model),
        seed=seed,
        start_timeout=start_timeout,
        log_dir=RESULTS / "logs" / stamp,
    )
    console = Console()
    try:
        for spec in system:
            parse_system(spec, plan.setting)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    measurements = run_plan(plan, console)
    console.print(as_table(compare(measurements)))
    folder = output or RESULTS / f"compare-{slug(model.name)}-{stamp}"
    write_results(folder, shlex.join(["tandem", *sys.argv[1:]]), contents(plan, measurements))
    console.print(f"written to {folder}", highlight=False, soft_wrap=True)
    if not measurements:
        raise typer.Exit(1)
