"""The launcher's work for the routers of `tandem serve --router-replicas 2`, also with fuzzed messages."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from deploy.routers.messages import (
    MAX_MESSAGE_BYTES,
    AdapterChange,
    AutoscalerEvent,
    CannotStart,
    ChangeAnswer,
    ChangeEnd,
    ChangeRequest,
    Expect,
    FromRouter,
    GaveUp,
    KnownWorker,
    LeaveAnswer,
    LeaveRequest,
    OtherDemand,
    RoleChange,
    RouterReport,
    Scaled,
    Scales,
    StopRouter,
    ToRouter,
    WorkerDied,
)
from deploy.routers.pool import RouterPool, RouterPorts
from deploy.routers.process import _Control
from deploy.slots import let_go
from messaging.sockets import ClusterKeys
from protocol.config import ServeConfig
from protocol.errors import ConfigError
from protocol.requests import Adapter
from protocol.roles import WorkerRange
from router.scaling.decide import ScalingDecision
from router.scaling.interface import ScaleAnswer, ScaleRequest, ScalingEvent
from router.server import RouterPlace, RouterServer, bind_http
from router.workers.assignment import RoleDemand
from tests.fuzzing import altered, damaged, fuzz
from tests.worker.harness import tiny_config


def test_a_taken_port_is_one_clear_error() -> None:
    with bind_http("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{port}"):
            RouterPorts(ServeConfig(port=port, router_replicas=2), "127.0.0.1")


def test_a_second_server_is_refused_the_routers_port() -> None:
    config = ServeConfig(port=0, router_replicas=2)
    with closing(RouterPorts(config, "127.0.0.1")) as ports:
        assert [place.own_port for place in ports.places] == [ports.port + 1, ports.port + 2]
        with (
            bind_http("127.0.0.1", ports.port, shared=True),
            pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{ports.port}"),
        ):
            RouterPorts(ServeConfig(port=ports.port, router_replicas=2), "127.0.0.1")


class Pool:
    """The launcher's side of two routers, with the routers' ends in this process."""

    def __init__(self) -> None:
        config = ServeConfig(
            port=0,
            router_replicas=2,
            autoscale={"decode": WorkerRange(1, 4)},
            lora_modules={"sql": "/adapters/sql"},
        )
        self._pool = RouterPool(config, ClusterKeys.generate(), "127.0.0.1")
        self._pool.on_leave(partial(let_go, []), lambda worker_id, role, incarnation: None)
        self._ends: list[socket.socket] = []
        for index in range(2):
            self._ends.append(self._attach(index))

    def _attach(self, index: int) -> socket.socket:
        """Attach a router and return its end."""
        router = self._pool._routers[index]
        router.control, end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._pool._selector.register(router.control, 1, router)
        router.process = SimpleNamespace(kill=lambda: None, wait=lambda: None)  # type: ignore[assignment]
        end.setblocking(False)
        return end

    def has_ended(self, index: int) -> bool:
        return self._pool._routers[index].process is None

    def start_anew(self, index: int) -> None:
        self._ends[index].close()
        self._ends[index] = self._attach(index)

    def says(self, index: int, message: FromRouter) -> list[Any]:
        """Send a router's message. Return what the router has been sent since its last message."""
        return self.says_raw(index, msgspec.msgpack.encode(message))

    def says_raw(self, index: int, message: bytes) -> list[Any]:
        self._ends[index].send(message)
        self._pool._read(self._pool._routers[index])
        answers = []
        while True:
            try:
                data = self._ends[index].recv(MAX_MESSAGE_BYTES)
            except BlockingIOError:
                return answers
            if not data:
                return answers
            answers.append(msgspec.msgpack.decode(data, type=ToRouter))  # type: ignore[arg-type]

    def asks(self, index: int, prompts: int) -> list[Any]:
        """Report from a router that this number of prompts was asked for. Return as `says` does."""
        return self.says(index, RouterReport({}, {"decode": RoleDemand(prompts=prompts)}))

    def stop(self) -> None:
        self._pool.stop()
        self._pool._watch()

    def lose(self, index: int) -> None:
        self._pool._on_end(self._pool._routers[index], "it was killed")

    def close(self) -> None:
        for router, end in zip(self._pool._routers, self._ends, strict=True):
            if router.process is not None:
                self._pool._bury(router)
            end.close()
        self._pool._selector.close()
        self._pool._ports.close()


@pytest.fixture
def pool() -> Iterator[Pool]:
    with closing(Pool()) as pool:
        yield pool


def test_one_router_scales_for_all(pool: Pool) -> None:
    """The first router scales by the sum of all requests. When it ends, the next one continues with it."""
    assert pool.asks(1, 5) == [Expect({}, {}), OtherDemand({})], "the other one has not begun"
    assert pool.asks(0, 3) == [Expect({}, {}), OtherDemand({"decode": RoleDemand(prompts=5)})]
    assert pool.asks(1, 7) == []
    pool.lose(0)
    assert pool.asks(1, 8) == [OtherDemand({"decode": RoleDemand(prompts=3)})]


def test_every_router_shows_decisions_about_scaling(pool: Pool) -> None:
    """This includes routers started later, and decisions that failed."""
    decision = ScalingDecision({"decode": 2}, {"decode": "many wait"})
    changed = AutoscalerEvent(
        ScalingEvent(1.0, ScalingDecision({}, {}, ("decode", "prefill")), {"prefill": 1})
    )
    scaled = AutoscalerEvent(ScalingEvent(2.0, decision, {"decode": 1}))
    failed = AutoscalerEvent(ScalingEvent(2.0, decision, {"decode": 1}, "no node came"))
    pool.asks(0, 0)
    for event in (changed, scaled, failed):
        assert pool.says(0, event) == [event]
    assert pool.asks(1, 0) == [changed, scaled, failed, Expect({}, {}), changed, failed]


def test_every_router_knows_the_adapters(pool: Pool) -> None:
    """This includes routers started later. Workers begin with the adapter "sql"."""
    new = AdapterChange("new", Adapter(name="new", path="/adapters/new", digest="1" * 32))
    gone, unloaded = AdapterChange("new", None), AdapterChange("sql", None)

    def told(index: int) -> list[AdapterChange]:
        return [message for message in pool.asks(index, 0) if isinstance(message, AdapterChange)]

    assert told(0) == told(1) == []
    assert pool.says(0, new) == pool.says(0, unloaded) == []
    assert told(1) == [new, unloaded]
    pool.lose(0)
    pool.start_anew(0)
    assert told(0) == [new, unloaded]
    assert pool.says(1, gone) == []
    assert told(0) == [gone]
    pool.lose(0)
    pool.start_anew(0)
    assert told(0) == [unloaded]


def test_a_long_list_of_adapters_is_sent_in_parts(pool: Pool) -> None:
    pool.asks(0, 0)
    path = "/" * 4000
    changes = [AdapterChange(str(i), Adapter(name=str(i), path=path, digest="1" * 32)) for i in range(200)]
    for change in changes:
        pool.says(0, change)
    told = [each for _ in range(10) for each in pool.asks(1, 0) if isinstance(each, AdapterChange)]
    assert told == changes


def test_routers_take_turns_with_changes_of_many_workers(pool: Pool) -> None:
    """One restart runs at a time, without scaling or autoscaling meanwhile. It ends if its router is lost."""
    restarts = ChangeAnswer("a restart is under way already, asked of router-0: ask again after that")
    scales = ChangeAnswer("a scaling is under way already, asked of router-1: ask again after that")
    pool.asks(0, 0)
    assert pool.says(0, ChangeRequest("restart")) == [ChangeAnswer("")]
    assert pool.says(1, ChangeRequest("restart")) == pool.says(1, ChangeRequest("scaling")) == [restarts]
    assert pool.asks(0, 1) == [], "nobody is to decide now"
    assert pool.says(0, ChangeEnd("restart")) == []
    assert pool.asks(0, 1) == [OtherDemand({})]
    assert (
        pool.says(1, ChangeRequest("scaling")) == pool.says(0, ChangeRequest("scaling")) == [ChangeAnswer("")]
    )
    assert pool.says(0, ChangeEnd("scaling")) == []
    assert pool.says(0, ChangeRequest("restart")) == [scales]
    pool.lose(1)
    assert pool.says(0, ChangeRequest("restart")) == [ChangeAnswer("")]


def test_one_router_at_a_time_changes_adapters(pool: Pool) -> None:
    """Changes of workers may run at the same time."""
    change = ChangeRequest("change of adapters")
    busy = "a change of adapters is under way already, asked of router-0: ask again after that"
    assert pool.says(0, change) == pool.says(1, ChangeRequest("restart")) == [ChangeAnswer("")]
    assert pool.says(1, change) == [ChangeAnswer(busy)]
    pool.says(0, ChangeEnd("change of adapters"))
    assert pool.says(1, change) == [ChangeAnswer("")]


def test_a_stop_does_not_wait_for_routers_that_are_starting(pool: Pool) -> None:
    """Starting routers read no messages, and starting may take as long as a tokenizer's download."""
    pool.asks(0, 0)
    pool.stop()
    assert (pool.has_ended(0), pool.has_ended(1)) == (False, True)


DEMAND = {"decode": RoleDemand(prompts=3, prompt_s=0.5)}
DECIDED = AutoscalerEvent(ScalingEvent(1.0, ScalingDecision({"decode": 2}, {"decode": "why"}), {"decode": 1}))
FROM_ROUTER = [
    RouterReport({"decode-0": KnownWorker("i", 0.5, {"host": "h"})}, DEMAND),
    LeaveRequest("decode-0", True),
    RoleChange("decode-0", "prefill", "i"),
    Scales(ScaleRequest(targets={"decode": 2}, worth=["decode-0"])),
    ChangeRequest("restart"),
    ChangeEnd("restart"),
    DECIDED,
    CannotStart("why"),
]
TO_ROUTER = [
    WorkerDied("decode-0", "i", "why"),
    Expect({"decode-0": "decode"}, {"decode": 1}),
    LeaveAnswer("decode-0", ""),
    Scaled(ScaleAnswer(started=["decode-1"])),
    ChangeAnswer(""),
    DECIDED,
    GaveUp("decode-1", "why"),
    OtherDemand(DEMAND),
    StopRouter(),
]


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
    assert pool.says(1, ChangeRequest("restart")) == [ChangeAnswer("")]


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

        check(msgspec.msgpack.encode(LeaveAnswer("decode-7", "")))
        check(whole[0][:-1])
        check(msgspec.msgpack.encode(LeaveAnswer("decode-0", "it stays")))
        assert await waiting == "it stays"
        fuzz(check, damaged(whole) | altered(whole), examples=300)

    with ours, theirs, closing(RouterServer(config, ClusterKeys.generate(), place=place)) as server:
        asyncio.run(say([msgspec.msgpack.encode(message) for message in TO_ROUTER]))
        server.expect({"decode-0": "decode"})
        assert server.state.registry.awaited() == ["decode-0"]
