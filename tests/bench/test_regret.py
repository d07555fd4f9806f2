"""Regret: workloads against a server that stalls for long prompts, and ratios to the best other system."""

import asyncio
import json

import numpy as np
import pytest
from typer.testing import CliRunner

from bench.cli import app
from bench.peers.systems import System
from bench.regret.command import Measurement, TurnFigures, regrets
from bench.regret.workloads import WORKLOADS, Draw
from tests.bench.test_bench_client import DONE, stream, token

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
