"""Long prompts among streams: how long the streams stall, and how long the long prompts wait.

    tandem bench mixed-load cost=http://127.0.0.1:8001 colocated=http://127.0.0.1:8002 --model NAME

The servers take turns, round by round. On each, every stream runs one request after another while long
prompts come at a steady pace. It prints medians over the rounds of the streams' p99 gap between two tokens
and of the long prompts' median TTFT, and the first server's ratios to each other one, taken within rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import statistics
import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from bench.serve.client import Client, Record, ServerTarget
from bench.serve.runner import drive, run_on_fast_loop
from bench.serve.workload import LoadRequest, random_tokens

STREAM_INPUT_LEN, STREAM_OUTPUT_LEN = 64, 256
LONG_OUTPUT_LEN = 8


class Figures(NamedTuple):
    """Seconds: the streams' p99 gap between two tokens, and the long prompts' median TTFT."""

    gap_s: float
    ttft_s: float


async def measure(target: ServerTarget, options: argparse.Namespace, seed: int) -> Figures:
    """Measure one server in one round. Raises RuntimeError if a request fails."""
    rng, client = np.random.default_rng(seed), Client(target)
    until = time.perf_counter() + options.seconds

    def request(length: int, output_len: int, arrival: float | None = None) -> LoadRequest:
        return LoadRequest(random_tokens(rng, length, options.vocab_size), output_len, arrival)

    async def stream() -> list[Record]:
        records = []
        while time.perf_counter() < until:
            records.append(await client.send(request(STREAM_INPUT_LEN, STREAM_OUTPUT_LEN)))
        return records

    arrivals = [(number + 0.5) / options.rate for number in range(int(options.rate * options.seconds))]
    long = [request(options.long_len, LONG_OUTPUT_LEN, arrival) for arrival in arrivals]
    prompts, *streams = await asyncio.gather(drive(client, long), *(stream() for _ in range(options.streams)))
    for record in itertools.chain(prompts, *streams):
        if record.error:
            raise RuntimeError(f"{target.base_url}: {record.error}: {record.detail}")
    gaps = np.concatenate([np.diff(record.token_times) for record in itertools.chain(*streams)])
    ttft_s = statistics.median(record.token_times[0] - record.start for record in prompts)
    return Figures(float(np.percentile(gaps, 99)), ttft_s)


def report(found: dict[str, list[Figures]]) -> str:
    first, *others = found
    lines = []
    for name, figures in found.items():
        gap_s, ttft_s = (statistics.median(values) for values in zip(*figures, strict=True))
        lines.append(f"{name}: p99 gap {gap_s * 1e3:.1f} ms, TTFT of long prompts {ttft_s * 1e3:.0f} ms")
    for name in others:
        pairs = list(zip(found[first], found[name], strict=True))
        gap = statistics.median(ours.gap_s / theirs.gap_s for ours, theirs in pairs)
        ttft = statistics.median(ours.ttft_s / theirs.ttft_s for ours, theirs in pairs)
        lines.append(f"{first} over {name}: p99 gap {gap:.2f}, TTFT of long prompts {ttft:.2f}")
    return "\n".join(lines)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "tandem bench mixed-load", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("servers", nargs="+", metavar="NAME=URL")
    parser.add_argument("--model", required=True, help="its name at all servers")
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--long-len", type=int, default=1500, help="tokens of a long prompt")
    parser.add_argument("--rate", type=float, default=2.0, help="long prompts a second")
    parser.add_argument("--seconds", type=float, default=10.0, help="of each server's turn")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--vocab-size", type=int, default=4096)
    parser.add_argument("--seed", type=int, default=int(time.time()), help="of the prompts")
    options = parser.parse_args(arguments)
    if options.streams < 1 or options.rate <= 0 or options.rate * options.seconds < 1:
        parser.error("--streams, --rate and --seconds must leave a stream and a long prompt")
    for server in options.servers:
        if "=" not in server:
            parser.error(f"not NAME=URL: {server}")
    return options


def main(arguments: Sequence[str]) -> None:
    options = parse(arguments)
    servers = dict(server.split("=", 1) for server in options.servers)
    found: dict[str, list[Figures]] = {name: [] for name in servers}
    for number in range(options.rounds):
        for name, url in servers.items():
            target = ServerTarget(url, options.model, ignore_eos=True)
            found[name].append(run_on_fast_loop(measure(target, options, options.seed + number)))
    print(report(found))
