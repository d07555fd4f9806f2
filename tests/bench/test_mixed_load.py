"""The load of long prompts among streams, against a server that stalls its streams for each long prompt."""

import asyncio
import json
import re

import pytest

from bench.mixed_load import Figures, measure, parse, report
from bench.serve.client import ServerTarget
from tests.bench.test_bench_client import DONE, stream, token

STALL_S = 0.06


async def test_streams_and_long_prompts_are_measured_apart(start_server):
    lengths = []

    async def serve(request, writer):
        length = len(json.loads(request.body)["prompt"])
        lengths.append(length)
        if length == 700:
            await asyncio.sleep(20 * STALL_S)
        await stream(writer, [token("a"), token("b"), token("c", "length"), DONE], STALL_S)

    options = parse(
        ["x=", "--model", "m", "--long-len", "700", "--seconds", "0.5", "--rate", "4", "--streams", "3"]
    )
    found = await measure(ServerTarget(await start_server(serve), "m"), options, seed=1)
    assert STALL_S <= found.gap_s < 20 * STALL_S <= found.ttft_s
    assert lengths.count(700) == 2 and lengths.count(64) >= 3


async def test_a_request_that_fails_ends_the_measurement(start_server):
    async def serve(request, writer):
        writer.write(b"HTTP/1.1 503 Service Unavailable\r\ncontent-length: 0\r\n\r\n")

    options = parse(["x=", "--model", "m", "--seconds", "0.5"])
    with pytest.raises(RuntimeError, match="503"):
        await measure(ServerTarget(await start_server(serve), "m"), options, seed=1)


def test_ratios_are_taken_within_rounds():
    ours, theirs = [Figures(0.01, 0.2), Figures(0.02, 0.4)], [Figures(0.02, 0.1), Figures(0.08, 0.2)]
    lines = report({"ours": ours, "theirs": theirs}).splitlines()
    assert [re.findall(r"[\d.]+", line) for line in lines] == [
        ["99", "15.0", "300"],
        ["99", "50.0", "150"],
        ["99", "0.38", "2.00"],
    ]


@pytest.mark.parametrize(
    "wrong", [["x=", "--streams", "0"], ["x=", "--rate", "0"], ["x=", "--seconds", "0.1"], ["http://a"]]
)
def test_wrong_options_are_refused(wrong, capsys):
    with pytest.raises(SystemExit):
        parse([*wrong[:1], "--model", "m", *wrong[1:]])
    assert "must leave" in (said := capsys.readouterr().err) or "not NAME=URL" in said
