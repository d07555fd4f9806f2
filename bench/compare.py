"""`tandem bench compare`: several systems under the same loads, as medians and ratios.

Within a round all systems get the same prompts; rounds get different prompts, so no prefix cache answers from
an earlier round. A system warms up at the measured concurrency, so that it compiles nothing during the
measurement.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.table import Table

from bench import turns
from bench.options import counts
from bench.peers.setup import DEFAULT_ENV_DIR
from bench.peers.systems import System, SystemSettings, labels_of, vocab_size_of
from bench.report import RESULTS, publish, terminal_table
from bench.serve.client import ServerTarget
from bench.serve.load import WARMUP_SEED
from bench.serve.runner import run_load
from bench.serve.statistics import Summary
from bench.serve.workload import LoadRequest, synthetic

WARMUP_OUTPUT_LEN = 32


class SystemMeasurement(msgspec.Struct, frozen=True):
    """One system under one load in one round. `load_average` is the machine's, over 1 minute."""

    system: str
    round: int
    concurrency: int
    summary: Summary
    client_cpu: float
    load_average: float

    def __str__(self) -> str:
        summary = self.summary
        failed = f", {summary.failed} failed: {summary.errors}" if summary.failed else ""
        return (
            f"{self.system}, concurrency {self.concurrency}: {summary.output_throughput:.1f} tok/s, "
            f"TTFT p50 {summary.ttft.p50 * 1e3:.1f} ms, TPOT p50 {summary.tpot.p50 * 1e3:.2f} ms, "
            f"load {self.load_average:.1f}{failed}"
        )


@dataclass(frozen=True, slots=True)
class ComparedLoads:
    """The loads of each system in each round."""

    concurrencies: Sequence[int]
    input_len: int
    output_len: int
    waves: int
    vocab_size: int
    seed: int

    def requests(self, number: int, concurrency: int) -> list[LoadRequest]:
        """Return the load of one round: `waves` times the concurrency, and at least 4 requests."""
        seed = self.seed + 1000 * number + concurrency
        count = max(4, self.waves * concurrency)
        return synthetic(count, self.input_len, self.output_len, self.vocab_size, seed)

    def warmups(self, concurrency: int) -> list[LoadRequest]:
        seed = WARMUP_SEED - concurrency
        return synthetic(concurrency, self.input_len, WARMUP_OUTPUT_LEN, self.vocab_size, seed)

    def measure(self, system: System, number: int) -> Iterator[SystemMeasurement]:
        """Measure every concurrency of one system. Raises RuntimeError if it does not answer."""
        target = ServerTarget(system.base_url, system.model, ignore_eos=True)
        for concurrency in self.concurrencies:
            requests, warmups = self.requests(number, concurrency), self.warmups(concurrency)
            result = run_load(target, requests, concurrency, warmups=warmups)
            load_average = os.getloadavg()[0]
            yield SystemMeasurement(
                system.label, number, concurrency, result.summary, result.client_cpu, load_average
            )


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


def compare(measurements: Sequence[SystemMeasurement], first: str) -> list[Comparison]:
    """Return the medians over the rounds for each concurrency and system, with ratios to `first`."""
    by_key: dict[tuple[int, str], dict[int, Summary]] = {}
    for m in measurements:
        by_key.setdefault((m.concurrency, m.system), {})[m.round] = m.summary
    comparisons = []
    for (concurrency, system), rounds in sorted(by_key.items(), key=lambda item: item[0][0]):
        base = by_key.get((concurrency, first), {}) if system != first else {}
        summaries = list(rounds.values())
        comparisons.append(
            Comparison(
                system,
                concurrency,
                len(rounds),
                statistics.median(s.output_throughput for s in summaries),
                statistics.median(s.ttft.p50 for s in summaries),
                statistics.median(s.tpot.p50 for s in summaries),
                sum(s.failed for s in summaries),
                turns.ratio_to(base, rounds, lambda summary: summary.output_throughput),
                turns.ratio_to(base, rounds, lambda summary: summary.ttft.p50),
            )
        )
    return comparisons


def as_table(comparisons: Sequence[Comparison]) -> Table:
    head = ("system", "at once", "rounds", "out tok/s", "ratio", "TTFT ms", "ratio", "TPOT ms", "failed")
    rows = [
        (
            *(c.system, str(c.concurrency), str(c.rounds), f"{c.output_throughput:.1f}"),
            *(turns.as_ratio(c.throughput_ratio), f"{c.ttft_p50 * 1e3:.1f}", turns.as_ratio(c.ttft_ratio)),
            *(f"{c.tpot_p50 * 1e3:.2f}", str(c.failed)),
        )
        for c in comparisons
    ]
    return terminal_table("medians over the rounds; ratios to the first system", head, rows)


def main(
    model: turns.ModelOption,
    system: turns.SystemOption,
    concurrency: Annotated[str, typer.Option(help="comma-separated")] = "1,4,16",
    rounds: turns.RoundsOption = 3,
    input_len: Annotated[int, typer.Option(min=1, help="random tokens per prompt")] = 256,
    output_len: Annotated[int, typer.Option(min=1, help="tokens generated")] = 128,
    waves: Annotated[int, typer.Option(min=1, help="requests: waves x concurrency, 4 at least")] = 4,
    threads: Annotated[int, typer.Option(min=1, help="cores for each system")] = os.cpu_count() or 1,
    max_model_len: Annotated[int, typer.Option(min=1)] = 2048,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    start_timeout: Annotated[float, typer.Option(help="seconds for a system to start")] = 600.0,
    env_dir: turns.EnvDirOption = DEFAULT_ENV_DIR,
    output: Annotated[Path | None, typer.Option(help="folder [default: one in bench/results/]")] = None,
) -> None:
    """Measure several systems under the same load, in turns, and compare them with the first."""
    setting = SystemSettings(model.resolve(), env_dir.resolve(), max_model_len, threads=threads)
    labels = labels_of(system, setting)
    concurrencies = counts("--concurrency", concurrency)
    loads = ComparedLoads(concurrencies, input_len, output_len, waves, vocab_size_of(model), seed)
    measurements = turns.take_turns(system, setting, rounds, loads.measure, start_timeout)
    comparisons = compare(measurements, labels[0])
    folder = output or RESULTS / f"compare-{turns.file_name(model.name)}-{time.strftime('%Y%m%d-%H%M%S')}"
    content = {
        "model": model.name,
        "load": {"input_len": input_len, "output_len": output_len, "waves": waves, "seed": seed},
        "systems": system,
        "medians": msgspec.to_builtins(comparisons),
        "measurements": msgspec.to_builtins(measurements),
    }
    publish(folder, content, as_table(comparisons))
