"""`tandem bench goodput`: requests per second that systems answer within the SLO as a trace speeds up.

In its turn a system replays a few seconds of the trace unmeasured, then the trace's first `--seconds` at each
speed. Each replay has different tokens, which share prefixes like the trace's, so no cache answers from an
earlier replay. Goodput is the number of requests that met both objectives, divided by the seconds during
which requests arrived. "Kept" is the goodput at the highest speed of at least twice the best speed, divided
by the best goodput.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.table import Table

from bench import turns
from bench.options import parsed
from bench.peers.setup import DEFAULT_ENV_DIR
from bench.peers.systems import System, SystemSettings, labels_of, vocab_size_of
from bench.report import RESULTS, publish, show, terminal_table
from bench.serve.client import Client, Record, ServerTarget
from bench.serve.runner import drive, run_on_fast_loop
from bench.serve.statistics import latencies, meets
from bench.serve.workload import LoadRequest, from_trace
from planner.trace import TraceFit, TraceLine, read_trace

WARMUP_SECONDS = 4.0
COLLAPSE = 0.25
"""Share of its best goodput below which a system gets no higher speed in that turn."""
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
    """Return the rates of requests that arrived within `seconds`. Refused and failed requests meet no
    objective.
    """
    answered = [latencies(record) for record in records if not record.error]
    late_ttft = sum(each["ttft"] > slo_ttft for each in answered)
    late_tpot = sum(each["tpot"] > slo_tpot for each in answered)
    good = sum(meets(each, {"ttft": slo_ttft, "tpot": slo_tpot}) for each in answered)
    refused = sum(record.error in REFUSALS for record in records)
    return {
        "offered": len(records) / seconds,
        "goodput": good / seconds,
        "refused": refused / seconds,
        "failed": (len(records) - len(answered) - refused) / seconds,
        "late_ttft": late_ttft / len(records),
        "late_tpot": late_tpot / len(records),
    }


@dataclass
class Replays:
    """Replays of one trace, each with different tokens."""

    lines: Sequence[TraceLine]
    vocab_size: int
    scale_lengths: float
    max_input_len: int | None
    speedups: Sequence[float]
    seconds: float
    slo_ttft: float
    slo_tpot: float
    seed: int = 0

    def __post_init__(self) -> None:
        self._seeds = itertools.count(self.seed)

    def requests(self, speedup: float, seconds: float) -> list[LoadRequest]:
        fit = TraceFit(self.scale_lengths, self.max_input_len, None, speedup)
        return first_seconds(from_trace(self.lines, fit, self.vocab_size, next(self._seeds)), seconds)

    def measure(self, system: System, number: int) -> Iterator[Goodput]:
        """Measure one system at rising speeds until it collapses."""
        client = Client(ServerTarget(system.base_url, system.model, ignore_eos=True))
        run_on_fast_loop(drive(client, self.requests(self.speedups[0], WARMUP_SECONDS)))
        most = 0.0
        for speedup in self.speedups:
            records = run_on_fast_loop(drive(client, self.requests(speedup, self.seconds)))
            found = judge(records, self.seconds, self.slo_ttft, self.slo_tpot)
            yield Goodput(system.label, number, speedup, **found)
            most = max(most, found["goodput"])
            if found["goodput"] < COLLAPSE * most:
                return


def as_table(found: Sequence[Goodput]) -> Table:
    """Return a table of the medians over the rounds."""
    rows = []
    for system, speedup in dict.fromkeys((each.system, each.speedup) for each in found):
        rounds = [each for each in found if (each.system, each.speedup) == (system, speedup)]
        fields = ("offered", "goodput", "refused", "failed", "late_ttft", "late_tpot")
        medians = [statistics.median(getattr(each, field) for each in rounds) for field in fields]
        rates, shares = [f"{rate:.2f}" for rate in medians[:4]], [f"{share:.0%}" for share in medians[4:]]
        rows.append((system, f"{speedup:g}", *rates, *shares))
    head = ("system", "speed", "offered", "goodput", "refused", "failed", "late TTFT", "late TPOT")
    return terminal_table("requests/s within the SLO, medians over the rounds", head, rows)


class BestGoodput(msgspec.Struct, frozen=True):
    """A system's goodput at its best speed, and the share of it that remains at twice that speed."""

    system: str
    speedup: float
    goodput: float
    kept: float | None


def best(found: Sequence[Goodput]) -> list[BestGoodput]:
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
        bests.append(BestGoodput(system, speedup, medians[speedup], kept))
    return bests


def describe(bests: Sequence[BestGoodput]) -> str:
    lines = []
    for each in bests:
        kept = "" if each.kept is None else f", kept {each.kept:.2f}"
        over = bests[0].goodput / each.goodput if each.goodput else float("inf")
        ratio = "" if each is bests[0] else f"; {bests[0].system} has {over:.2f} times that"
        lines.append(f"{each.system}: {each.goodput:.2f} at speed {each.speedup:g}{kept}{ratio}")
    return "\n".join(lines)


def main(
    model: turns.ModelOption,
    trace: Annotated[Path, typer.Option(exists=True, dir_okay=False, help="JSONL in Mooncake's form")],
    system: turns.SystemOption,
    scale_lengths: Annotated[float, typer.Option(min=1e-6, help="factor on the trace's lengths")] = 0.03,
    max_input_len: Annotated[int, typer.Option(min=1, help="longer prompts are cut")] = 3900,
    speedups: Annotated[str, typer.Option(help="of the trace, ascending, comma-separated")] = "1,2,4,8,16",
    seconds: Annotated[float, typer.Option(min=0.1, help="of each replay")] = 10.0,
    slo_ttft: Annotated[float, typer.Option(min=0.0, help="seconds to the first token")] = 0.5,
    slo_tpot: Annotated[float, typer.Option(min=0.0, help="seconds for each further token")] = 0.02,
    rounds: turns.RoundsOption = 1,
    seed: Annotated[int, typer.Option(min=0, help="of the first replay's tokens; later ones count up")] = 0,
    env_dir: turns.EnvDirOption = DEFAULT_ENV_DIR,
    output: Annotated[Path, typer.Option(help="folder for the figures")] = RESULTS / "goodput",
) -> None:
    """Measure requests a second within the SLO over the rate of a trace, of several systems in turns."""
    speeds = parsed("--speedups", speedups, float)
    if speeds != sorted(speeds) or speeds[0] <= 0:
        raise typer.BadParameter(f"--speedups: not ascending, or not above 0: {speedups}")
    setting = SystemSettings(model.resolve(), env_dir.resolve(), max_model_len=4096)
    labels_of(system, setting)
    slo = {"slo_ttft": slo_ttft, "slo_tpot": slo_tpot}
    lines, vocab_size = read_trace(trace), vocab_size_of(model)
    replays = Replays(lines, vocab_size, scale_lengths, max_input_len, speeds, seconds, **slo, seed=seed)
    found = turns.take_turns(system, setting, rounds, replays.measure)
    content = {"best": msgspec.to_builtins(best(found)), "replays": msgspec.to_builtins(found)}
    publish(output, content, as_table(found))
    show(describe(best(found)))
