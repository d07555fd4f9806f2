"""Measures how many requests per second several systems answer within the SLO as a trace speeds up.

    tandem bench goodput --model FOLDER --trace TRACE --system tandem --system vllm-tamed \
        --scale-lengths 0.03 --speedups 1,2,4,8,16 --seconds 10 --slo-ttft 0.5 --slo-tpot 0.02

Systems are given as for `tandem bench compare`; they take turns, round by round. In its turn a system starts,
replays a few seconds of the trace unmeasured, then the first `--seconds` of it at each speed. Each replay has
different tokens, which share prefixes as the trace's do, so no cache answers from an earlier replay. Goodput
is the number of requests that met both objectives, divided by the seconds in which requests came. "Kept" is
the goodput at the highest speed of at least twice the best speed, divided by the best goodput.
"""

from __future__ import annotations

import argparse
import itertools
import shlex
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from bench.compare import slug, vocab_size_of
from bench.peers.process import RunningSystem
from bench.peers.setup import DEFAULT_ENV_DIR
from bench.peers.systems import Setting, System, parse_system
from bench.record import write_results
from bench.serve import trace
from bench.serve.client import Client, Record, ServerTarget
from bench.serve.runner import drive, run_on_fast_loop
from bench.serve.statistics import latencies
from bench.serve.workload import LoadRequest
from planner.trace import TraceFit, TraceLine, read_trace

WARMUP_SECONDS = 4.0
START_TIMEOUT_S = 300.0
COLLAPSE = 0.25
"""A system whose goodput falls below this share of its best one gets no higher speed in that turn."""
REFUSALS = ("HTTP 429", "HTTP 503")


class Goodput(msgspec.Struct, frozen=True):
    """One replay, in requests per second; `late_ttft` and `late_tpot` are shares of all its requests."""

    system: str
    round: int
    speedup: float
    offered: float
    goodput: float
    refused: float
    failed: float
    late_ttft: float
    late_tpot: float


def first_seconds(requests: Sequence[LoadRequest], seconds: float) -> list[LoadRequest]:
    return [request for request in requests if request.arrival is not None and request.arrival < seconds]


def judge(records: Sequence[Record], seconds: float, slo_ttft: float, slo_tpot: float) -> dict[str, float]:
    """Return the rates of requests that came within `seconds`. A request that is refused or fails meets no
    objective.
    """
    answered = [latencies(record) for record in records if not record.error]
    late_ttft = sum(each["ttft"] > slo_ttft for each in answered)
    late_tpot = sum(each["tpot"] > slo_tpot for each in answered)
    good = sum(each["ttft"] <= slo_ttft and each["tpot"] <= slo_tpot for each in answered)
    refused = sum(record.error in REFUSALS for record in records)
    return {
        "offered": len(records) / seconds,
        "goodput": good / seconds,
        "refused": refused / seconds,
        "failed": (len(records) - len(answered) - refused) / seconds,
        "late_ttft": late_ttft / len(records),
        "late_tpot": late_tpot / len(records),
    }


class Replays:
    """Replays of one trace, each with different tokens."""

    def __init__(self, lines: Sequence[TraceLine], options: argparse.Namespace, vocab_size: int) -> None:
        self._lines, self._options, self._vocab_size = lines, options, vocab_size
        self._seeds = itertools.count(options.seed)

    def requests(self, speedup: float, seconds: float) -> list[LoadRequest]:
        options = self._options
        fit = TraceFit(options.scale_lengths, options.max_input_len, None, speedup)
        made = trace.to_requests(self._lines, fit, self._vocab_size, next(self._seeds))
        return first_seconds(made, seconds)

    def run(self, system: System, number: int, logs: Path) -> Iterator[Goodput]:
        """Run one system's turn."""
        options = self._options
        client = Client(ServerTarget(system.base_url, system.model, ignore_eos=True))
        with RunningSystem(system.commands, logs / f"{number}-{slug(system.label)}", START_TIMEOUT_S):
            run_on_fast_loop(drive(client, self.requests(options.speedups[0], WARMUP_SECONDS)))
            most = 0.0
            for speedup in options.speedups:
                records = run_on_fast_loop(drive(client, self.requests(speedup, options.seconds)))
                found = judge(records, options.seconds, options.slo_ttft, options.slo_tpot)
                yield Goodput(system.label, number, speedup, **found)
                most = max(most, found["goodput"])
                if found["goodput"] < COLLAPSE * most:
                    return


def as_table(found: Sequence[Goodput]) -> Table:
    """Return a table of the medians over the rounds."""
    table = Table(title="requests/s within the SLO, medians over the rounds", title_justify="left")
    for column in ("system", "speed", "offered", "goodput", "refused", "late TTFT", "late TPOT", "failed"):
        table.add_column(column, justify="left" if column == "system" else "right")
    for system, speedup in dict.fromkeys((each.system, each.speedup) for each in found):
        rounds = [each for each in found if (each.system, each.speedup) == (system, speedup)]

        def median(field: str, rounds: Sequence[Goodput] = rounds) -> float:
            return statistics.median(getattr(each, field) for each in rounds)

        rates = [f"{median(field):.2f}" for field in ("offered", "goodput", "refused")]
        shares = [f"{median(field):.0%}" for field in ("late_ttft", "late_tpot")]
        table.add_row(system, f"{speedup:g}", *rates, *shares, f"{median('failed'):.2f}")
    return table


class Best(msgspec.Struct, frozen=True):
    """A system's goodput at its best speed, and the share of it that remains at twice that speed."""

    system: str
    speedup: float
    goodput: float
    kept: float | None


def best(found: Sequence[Goodput]) -> list[Best]:
    bests = []
    for system in dict.fromkeys(each.system for each in found):
        by_speed: dict[float, list[float]] = {}
        for each in found:
            if each.system == system:
                by_speed.setdefault(each.speedup, []).append(each.goodput)
        medians = {speedup: statistics.median(goodputs) for speedup, goodputs in by_speed.items()}
        speedup = max(medians, key=lambda speed: medians[speed])
        twice = [medians[speed] for speed in medians if speed >= 2 * speedup]
        kept = twice[-1] / medians[speedup] if twice and medians[speedup] else None
        bests.append(Best(system, speedup, medians[speedup], kept))
    return bests


def describe(bests: Sequence[Best]) -> str:
    lines = []
    for each in bests:
        kept = "" if each.kept is None else f", kept {each.kept:.2f}"
        over = bests[0].goodput / each.goodput if each.goodput else float("inf")
        ratio = "" if each is bests[0] else f"; {bests[0].system} has {over:.2f} times that"
        lines.append(f"{each.system}: {each.goodput:.2f} at speed {each.speedup:g}{kept}{ratio}")
    return "\n".join(lines)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "tandem bench goodput", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True, help="local model folder")
    parser.add_argument("--trace", type=Path, required=True, help="JSONL in Mooncake's form")
    parser.add_argument("--system", action="append", required=True, help="[label=]name [flags], or a URL")
    parser.add_argument("--scale-lengths", type=float, default=0.03)
    parser.add_argument("--max-input-len", type=int, default=3900, help="longer prompts are cut")
    parser.add_argument("--speedups", type=_speedups, default=[1.0, 2.0, 4.0, 8.0, 16.0], help="ascending")
    parser.add_argument("--seconds", type=float, default=10.0, help="of each replay")
    parser.add_argument("--slo-ttft", type=float, default=0.5)
    parser.add_argument("--slo-tpot", type=float, default=0.02)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument(
        "--seed", type=int, default=0, help="of the first replay's tokens; later ones count up"
    )
    parser.add_argument("--env-dir", type=Path, default=DEFAULT_ENV_DIR, help="the peers' environments")
    parser.add_argument("--output", type=Path, help="folder for the figures")
    options = parser.parse_args(arguments)
    if options.seconds <= 0 or options.rounds < 1:
        parser.error("--seconds must be above 0, --rounds at least 1")
    return options


def _speedups(text: str) -> list[float]:
    speedups = [float(part) for part in text.split(",")]
    if speedups != sorted(speedups) or speedups[0] <= 0:
        raise argparse.ArgumentTypeError(f"not ascending, or not above 0: {text}")
    return speedups


def main(arguments: Sequence[str]) -> None:
    options = parse(arguments)
    setting = Setting(options.model.resolve(), options.env_dir.expanduser().resolve(), max_model_len=4096)
    replays = Replays(read_trace(options.trace), options, vocab_size_of(options.model))
    found: list[Goodput] = []
    console = Console(width=110)
    with tempfile.TemporaryDirectory() as logs:
        for number in range(options.rounds):
            for spec in options.system:
                for each in replays.run(parse_system(spec, setting), number, Path(logs)):
                    console.print(each, soft_wrap=True)
                    found.append(each)
    console.print(as_table(found))
    print(describe(best(found)))
    if options.output is not None:
        command = shlex.join(["tandem", "bench", "goodput", *arguments])
        content = {"best": msgspec.to_builtins(best(found)), "replays": msgspec.to_builtins(found)}
        write_results(options.output, command, content)
