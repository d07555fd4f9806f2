"""Goodput of replayed loads, regret against the best other system, and memory over a long run."""

from __future__ import annotations

import asyncio
import json
import mmap
import os
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from bench.cli import app
from bench.goodput import Goodput, Replays, best, describe, first_seconds, judge
from bench.peers.systems import System
from bench.regret.command import Measurement, TurnFigures, regrets
from bench.regret.workloads import WORKLOADS, Draw
from bench.serve.client import Record
from bench.serve.workload import LoadRequest
from bench.soak import written_bytes
from planner.trace import TraceLine
from tests.bench.test_bench_client import DONE, stream, token


def record(ttft: float, tpot: float = 0.01, error: str = "") -> Record:
    times = [10 + ttft, 10 + ttft + tpot]
    return Record(start=10.0, end=times[-1], token_times=times, output_tokens=2, error=error)


def test_goodput_counts_requests_that_met_both_objectives():
    records = [record(0.1), record(0.6), record(0.1, 0.03), record(0.6, 0.03), record(0.2)]
    refused = [record(0, error="HTTP 429"), record(0, error="HTTP 503"), record(0, error="timeout")]
    assert judge([*records, *refused], 2.0, 0.5, 0.02) == {
        "offered": 4.0,
        "goodput": 1.0,
        "refused": 1.0,
        "failed": 0.5,
        "late_ttft": 0.25,
        "late_tpot": 0.25,
    }


def test_only_the_first_seconds_are_replayed():
    requests = [LoadRequest([1], 1, at) for at in (0.0, 0.9, 1.0, 3.0)]
    assert [each.arrival for each in first_seconds(requests, 1.0)] == [0.0, 0.9]


def goodput(system: str, number: int, speedup: float, requests: float) -> Goodput:
    return Goodput(system, number, speedup, 8.0, requests, 0, 0, 0, 0)


def test_kept_goodput_is_measured_at_twice_the_best_speed():
    a = [goodput("a", n, 2, g) for n, g in enumerate([4, 4, 9])]
    a += [goodput("a", n, 3, g) for n, g in enumerate([6, 6, 6])]
    a += [goodput("a", n, 6, g) for n, g in enumerate([3, 3, 3])]
    b = [goodput("b", 0, 3, 2), goodput("b", 0, 6, 3)]
    ours, theirs = best([*a, *b])
    assert (ours.speedup, ours.goodput, ours.kept) == (3, 6, 0.5)
    assert (theirs.speedup, theirs.goodput, theirs.kept) == (6, 3, None)
    assert "a has 2.00 times that" in describe([ours, theirs])


async def test_replays_share_prefixes_but_not_with_each_other(start_server):
    prompts: list[list[int]] = []

    async def serve(request, writer):
        prompts.append(json.loads(request.body)["prompt"])
        await stream(writer, [token("a"), token("b", "length"), DONE], 0.0)

    lines = [TraceLine(1000 * n, 1024, 2, [0, n + 1]) for n in range(4)]
    system = System("x", await start_server(serve), "m")
    replays = Replays(lines, 4096, 0.1, 3900, [2.0, 40.0], 0.1, 0.5, 0.02)
    found = await asyncio.to_thread(lambda: list(replays.measure(system, 0)))
    assert [each.offered for each in found] == [10.0, 40.0]
    assert [each.goodput for each in found] == [10.0, 40.0]
    last = sorted(map(tuple, prompts[-4:]))
    assert len({prompt[:51] for prompt in last}) == 1 and len(set(last)) == 4
    assert last[0][:51] not in {tuple(prompt[:51]) for prompt in prompts[:-4]}


async def test_a_collapsed_system_is_not_tested_at_higher_speed(start_server):
    served = 0

    async def serve(request, writer):
        nonlocal served
        served += 1
        if served > 3:  # the warm-up and the first speed
            writer.write(b"HTTP/1.1 503 Service Unavailable\r\ncontent-length: 0\r\n\r\n")
        else:
            await stream(writer, [token("a", "length"), DONE], 0.0)

    lines = [TraceLine(0, 40, 1, [0]), TraceLine(10_000, 40, 1, [1])]
    replays = Replays(lines, 4096, 0.03, 3900, [1.0, 2.0, 4.0], 0.1, 0.5, 0.02)
    system = System("x", await start_server(serve), "m")
    found = await asyncio.to_thread(lambda: list(replays.measure(system, 0)))
    assert [each.goodput for each in found] == [10.0, 10.0, 0.0]
    served = 1
    found = await asyncio.to_thread(lambda: list(replays.measure(system, 0)))
    assert [each.goodput for each in found] == [10.0, 0.0]


STALL_S = 0.03


def measured(system: System, workload: str) -> TurnFigures:
    measurement = Measurement(seconds=0.5, load=1.0, vocab_size=4096, seed=1)
    measurement.warm_up(system)
    return measurement.measure(system, workload, 0)


@pytest.mark.parametrize("name", WORKLOADS)
def test_each_workload_has_requests_within_its_time(name):
    chains = WORKLOADS[name](Draw(np.random.default_rng(0), 4096, 8.0, 0.7))
    first = [next(chain.requests) for chain in chains]
    assert first and all(0 <= chain.start <= 8.0 for chain in chains)
    assert all(len(request.prompt) + request.output_len <= 4096 for request in first)


async def test_streams_and_long_prompts_are_judged_apart(start_server):
    lengths = []

    async def serve(request, writer):
        length = len(json.loads(request.body)["prompt"])
        lengths.append(length)
        if length == 1500:
            await asyncio.sleep(30 * STALL_S)
        await stream(writer, [token("a"), token("b"), token("c", "length"), DONE], STALL_S)

    system = System("x", await start_server(serve), "m")
    found = await asyncio.to_thread(measured, system, "streams")
    assert STALL_S <= found.gap_p99 < 30 * STALL_S <= found.ttft_p50
    assert found.goodput > 0 and lengths.count(1500) >= 1 and lengths.count(64) >= 8


async def test_a_request_that_fails_ends_the_measurement(start_server):
    async def serve(request, writer):
        writer.write(b"HTTP/1.1 503 Service Unavailable\r\ncontent-length: 0\r\n\r\n")

    system = System("x", await start_server(serve), "m")
    with pytest.raises(RuntimeError, match="503"):
        await asyncio.to_thread(measured, system, "chat")


def test_regret_is_the_lowest_median_ratio_to_another_system():
    found = [
        TurnFigures("cost", "chat", 0, 4.0, 0.2, 0.4, 0.02),
        TurnFigures("whole", "chat", 0, 5.0, 0.1, 0.8, 0.02),
        TurnFigures("split", "chat", 0, 2.0, 0.4, 0.2, 0.01),
        TurnFigures("cost", "chat", 1, 5.0, 0.2, 0.4, 0.02),
        TurnFigures("whole", "chat", 1, 5.0, 0.2, 0.4, 0.02),
        TurnFigures("cost", "bursts", 0, 0.0, 9.0, 9.0, 9.0),
        TurnFigures("whole", "bursts", 0, 1.0, 9.0, 9.0, 9.0),
        TurnFigures("cost", "giant", 0, 1.0, 9.0, 9.0, 9.0),
    ]
    expected = {"goodput": 0.9, "ttft_p50": 0.75, "ttft_p99": 0.5, "gap_p99": 0.5}
    assert regrets(found, "cost", "chat") == pytest.approx(expected)
    assert regrets(found, "cost", "bursts")["goodput"] == 0.0
    assert set(regrets(found, "cost", "giant").values()) == {None}


def test_an_unknown_workload_is_refused(tmp_path):
    result = CliRunner().invoke(app, ["regret", "--model", str(tmp_path), "--workload", "chats"])
    assert result.exit_code == 2 and "--workload" in result.output


SIZE = 64 * 2**20
SLACK = 8 * 2**20


def touch(memory: mmap.mmap) -> None:
    for place in range(0, SIZE, mmap.PAGESIZE):
        assert memory[place] in (0, 1)


def test_written_memory_counts_and_file_pages_do_not(tmp_path: Path) -> None:
    file = tmp_path / "library"
    file.write_bytes(bytes(SIZE))
    before = written_bytes(os.getpid())
    with (
        file.open("rb") as opened,
        mmap.mmap(opened.fileno(), SIZE, mmap.MAP_PRIVATE, mmap.PROT_READ) as read,
    ):
        touch(read)
        assert abs(written_bytes(os.getpid()) - before) < SLACK
    with mmap.mmap(-1, SIZE, mmap.MAP_PRIVATE) as written:
        for place in range(0, SIZE, mmap.PAGESIZE):
            written[place] = 1
        touch(written)
        assert abs(written_bytes(os.getpid()) - before - SIZE) < SLACK
