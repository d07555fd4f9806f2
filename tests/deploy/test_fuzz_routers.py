"""Fuzzes the messages between the launcher and the routers' processes: neither can end the other."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from deploy.routers.messages import (
    Begins,
    Begun,
    CannotStart,
    Decided,
    Ends,
    Expect,
    GaveUp,
    KnownWorker,
    Lead,
    Leaves,
    LetGo,
    Renews,
    RouterReport,
    Scaled,
    Scales,
    StopRouter,
    WorkerDied,
)
from deploy.routers.process import _Control
from messaging.sockets import ClusterKeys
from router.scaling.decide import ScalingDecision
from router.scaling.interface import ScaleAnswer, ScaleRequest, ScalingEvent
from router.server import RouterPlace, RouterServer
from router.workers.demand import RoleDemand
from tests.deploy.test_routers import Pool
from tests.fuzzing import altered, damaged, fuzz
from tests.worker.harness import tiny_config

DEMAND = {"decode": RoleDemand(prompts=3, prompt_s=0.5)}
DECIDED = Decided(ScalingEvent(1.0, ScalingDecision({"decode": 2}, {"decode": "why"}), {"decode": 1}))
FROM_ROUTER = [
    RouterReport({"decode-0": KnownWorker("i", 0.5, {"host": "h"})}, DEMAND),
    Leaves("decode-0", True),
    Renews("decode-0", "prefill", "i"),
    Scales(ScaleRequest(targets={"decode": 2}, worth=["decode-0"])),
    Begins("restart"),
    Ends("restart"),
    DECIDED,
    CannotStart("why"),
]
TO_ROUTER = [
    WorkerDied("decode-0", "i", "why"),
    Expect({"decode-0": "decode"}, {"decode": 1}),
    LetGo("decode-0", ""),
    Scaled(ScaleAnswer(started=["decode-1"])),
    Begun(""),
    DECIDED,
    GaveUp("decode-1", "why"),
    Lead(DEMAND),
    StopRouter(),
]


@pytest.fixture
def pool() -> Iterator[Pool]:
    with closing(Pool()) as pool:
        yield pool


def test_fuzz_a_router(pool: Pool, caplog: pytest.LogCaptureFixture) -> None:
    """A router restarts if its messages cannot be decoded. The other router continues."""
    caplog.set_level(logging.CRITICAL)  # do not keep a line for each
    pool.asks(0, 1)
    pool.asks(1, 1)
    num_ended = 0

    def check(raw: bytes) -> None:
        nonlocal num_ended
        pool.says_raw(0, raw)
        if pool.has_ended(0):
            num_ended += 1
            pool.start_anew(0)
        pool.asks(1, 1)
        assert not pool.has_ended(1)

    whole = [msgspec.msgpack.encode(message) for message in FROM_ROUTER]
    fuzz(check, damaged(whole) | altered(whole), examples=300)
    assert num_ended > 20
    pool.lose(0)
    pool.start_anew(0)
    assert pool.says(1, Begins("restart")) == [Begun("")]


@pytest.mark.timeout(900)
def test_fuzz_the_launcher(tiny_folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A router drops messages that it does not understand, and answers that nobody waits for."""
    caplog.set_level(logging.CRITICAL)
    config = replace(tiny_config(tiny_folder), port=0)
    place = RouterPlace(router_id="router-0", own_port=0, link_port=0)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)

    async def say(whole: list[bytes]) -> None:
        control = _Control(theirs, server)
        waiting = asyncio.ensure_future(server.state.drainer.let_go("decode-0", True))
        gone = asyncio.ensure_future(server.state.drainer.let_go("decode-7", True))
        await asyncio.sleep(0)
        gone.cancel()
        await asyncio.sleep(0)

        def check(raw: bytes) -> None:
            if raw:  # otherwise the launcher closed its end
                ours.send(raw)
                control._read()

        check(msgspec.msgpack.encode(LetGo("decode-7", "")))
        check(whole[0][:-1])
        check(msgspec.msgpack.encode(LetGo("decode-0", "it stays")))
        assert await waiting == "it stays"
        fuzz(check, damaged(whole) | altered(whole), examples=300)

    with ours, theirs, closing(RouterServer(config, ClusterKeys.generate(), place=place)) as server:
        asyncio.run(say([msgspec.msgpack.encode(message) for message in TO_ROUTER]))
        server.expect({"decode-0": "decode"})
        assert server.state.registry.awaited() == ["decode-0"]
