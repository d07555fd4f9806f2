"""`tandem bench mixed-load`: how long streams stall, and long prompts among them wait.

In a system's turn every stream runs one request after another while long prompts come at a steady pace. The
table has medians over the rounds of the streams' p99 gap between two tokens and of the long prompts' median
TTFT, with ratios to the first system within rounds.
"""

from __future__ import annotations

import asyncio
import itertools
import operator
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np
import typer
from rich.table import Table

from bench import turns
from bench.peers.setup import DEFAULT_ENV_DIR
from bench.peers.systems import System, SystemSettings, labels_of, vocab_size_of
from bench.report import RESULTS, command_line, publish, terminal_table
from bench.serve.client import Client, Record, ServerTarget
from bench.serve.runner import drive, run_on_fast_loop
from bench.serve.workload import LoadRequest, random_tokens

STREAM_INPUT_LEN, STREAM_OUTPUT_LEN = 64, 256
LONG_OUTPUT_LEN = 8


class Stalls(msgspec.Struct, frozen=True):
    """Seconds: the streams' p99 gap between two tokens, and the long prompts' median TTFT."""

    system: str
    round: int
    gap_s: float
    ttft_s: float


@dataclass(frozen=True)
class MixedLoad:
    streams: int
    long_len: int
    rate: float
    seconds: float
    vocab_size: int
    seed: int

    def measure(self, system: System, number: int) -> Iterator[Stalls]:
        yield run_on_fast_loop(self._measure(system, number))

    async def _measure(self, system: System, number: int) -> Stalls:
        """Measure one system in one round. Raises RuntimeError if a request fails."""
        client = Client(ServerTarget(system.base_url, system.model, ignore_eos=True))
        rng = np.random.default_rng(self.seed + number)
        until = time.perf_counter() + self.seconds

        def request(length: int, output_len: int, arrival: float | None = None) -> LoadRequest:
            return LoadRequest(random_tokens(rng, length, self.vocab_size), output_len, arrival)

        async def stream() -> list[Record]:
            records = []
            while time.perf_counter() < until:
                records.append(await client.send(request(STREAM_INPUT_LEN, STREAM_OUTPUT_LEN)))
            return records

        arrivals = [(index + 0.5) / self.rate for index in range(int(self.rate * self.seconds))]
        long = [request(self.long_len, LONG_OUTPUT_LEN, arrival) for arrival in arrivals]
        prompts, *streams = await asyncio.gather(
            drive(client, long), *(stream() for _ in range(self.streams))
        )
        for record in itertools.chain(prompts, *streams):
            if record.error:
                raise RuntimeError(f"{system.base_url}: {record.error}: {record.detail}")
        gaps = np.concatenate([np.diff(record.token_times) for record in itertools.chain(*streams)])
        ttft_s = statistics.median(record.token_times[0] - record.start for record in prompts)
        return Stalls(system.label, number, float(np.percentile(gaps, 99)), ttft_s)


def as_table(found: Sequence[Stalls], first: str) -> Table:
    by_system: dict[str, dict[int, Stalls]] = {}
    for each in found:
        by_system.setdefault(each.system, {})[each.round] = each
    rows = []
    for system, rounds in by_system.items():
        base = by_system.get(first, {}) if system != first else {}
        row = [system]
        for value in (operator.attrgetter("gap_s"), operator.attrgetter("ttft_s")):
            row.append(f"{statistics.median(map(value, rounds.values())) * 1e3:.1f}")
            row.append(turns.as_ratio(turns.ratio_to(base, rounds, value)))
        rows.append(row)
    head = ("system", "p99 gap, ms", "ratio", "TTFT of long prompts, ms", "ratio")
    return terminal_table("medians over the rounds; ratios to the first system", head, rows)


def main(
    model: turns.ModelOption,
    system: turns.SystemOption,
    streams: Annotated[int, typer.Option(min=1)] = 8,
    long_len: Annotated[int, typer.Option(min=1, help="tokens of a long prompt")] = 1500,
    rate: Annotated[float, typer.Option(min=0.001, help="long prompts a second")] = 2.0,
    seconds: Annotated[float, typer.Option(min=0.001, help="of each system's turn")] = 10.0,
    rounds: turns.RoundsOption = 3,
    seed: Annotated[int, typer.Option(min=0, help="of the prompts")] = 0,
    env_dir: turns.EnvDirOption = DEFAULT_ENV_DIR,
    output: Annotated[Path, typer.Option(help="folder for the figures")] = RESULTS / "mixed-load",
) -> None:
    """Measure how long prompts stall other streams, on several systems in turns."""
    command = command_line("tandem bench mixed-load", main, dict(locals()))
    if rate * seconds < 1:
        raise typer.BadParameter(f"--rate and --seconds leave no long prompt: {rate:g} x {seconds:g}")
    setting = SystemSettings(model.resolve(), env_dir.expanduser().resolve())
    labels = labels_of(system, setting)
    load = MixedLoad(streams, long_len, rate, seconds, vocab_size_of(model), seed)
    found = turns.take_turns(system, setting, rounds, load.measure)
    content = {"measurements": msgspec.to_builtins(found)}
    publish(output, command, content, as_table(found, labels[0]))
