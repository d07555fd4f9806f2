"""The load of long prompts among streams, against a server that stalls its streams for each long prompt."""

import asyncio
import io
import json

import pytest
from rich.console import Console
from typer.testing import CliRunner

from bench.cli import app
from bench.mixed_load import MixedLoad, Stalls, as_table
from bench.peers.systems import System
from tests.bench.test_bench_client import DONE, stream, token

STALL_S = 0.06
LOAD = MixedLoad(streams=3, long_len=700, rate=4.0, seconds=0.5, vocab_size=4096, seed=1)


async def test_streams_and_long_prompts_are_measured_apart(start_server):
    lengths = []

    async def serve(request, writer):
        length = len(json.loads(request.body)["prompt"])
        lengths.append(length)
        if length == 700:
            await asyncio.sleep(20 * STALL_S)
        await stream(writer, [token("a"), token("b"), token("c", "length"), DONE], STALL_S)

    system = System("x", await start_server(serve), "m")
    [found] = await asyncio.to_thread(lambda: list(LOAD.measure(system, 0)))
    assert STALL_S <= found.gap_s < 20 * STALL_S <= found.ttft_s
    assert lengths.count(700) == 2 and lengths.count(64) >= 3


async def test_a_request_that_fails_ends_the_measurement(start_server):
    async def serve(request, writer):
        writer.write(b"HTTP/1.1 503 Service Unavailable\r\ncontent-length: 0\r\n\r\n")

    system = System("x", await start_server(serve), "m")
    with pytest.raises(RuntimeError, match="503"):
        await asyncio.to_thread(lambda: list(LOAD.measure(system, 0)))


def test_ratios_are_taken_within_rounds():
    first = [Stalls("first", 0, 0.02, 0.1), Stalls("first", 1, 0.08, 0.2)]
    other = [Stalls("other", 0, 0.01, 0.2), Stalls("other", 1, 0.02, 0.4)]
    console = Console(file=io.StringIO(), width=100)
    console.print(as_table([*first, *other], "first"))
    lines = [line.split() for line in console.file.getvalue().splitlines() if "0.0" in line or "150" in line]
    told = [[cell for cell in line if cell != "│"] for line in lines]
    assert told == [["first", "50.0", "150.0"], ["other", "15.0", "0.38x", "300.0", "2.00x"]]


@pytest.mark.parametrize(
    ("wrong", "complaint"), [(["--streams", "0"], "--streams"), (["--seconds", "0.1"], "no long prompt")]
)
def test_wrong_options_are_refused(wrong, complaint, tmp_path):
    fixed = ["mixed-load", "--model", str(tmp_path), "--system", "http://127.0.0.1:1"]
    result = CliRunner().invoke(app, [*fixed, *wrong])
    assert result.exit_code == 2 and complaint in result.output
