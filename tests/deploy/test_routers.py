"""The launcher's work for the routers of `tandem serve --router-replicas 2`, also with fuzzed messages."""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from deploy.routers.calls import MAX_MESSAGE_BYTES, Answer, Call, KnownWorker, call, encode, message_decoder
from deploy.routers.pool import RouterEnd, RouterPool, RouterPorts
from deploy.routers.process import _Control
from deploy.slots import let_go
from messaging.sockets import ClusterKeys
from protocol.config import ServeConfig
from protocol.errors import ConfigError
from protocol.requests import Adapter
from protocol.roles import WorkerRange
from router.adapters import AdapterTable
from router.scaling.decide import ScalingDecision
from router.scaling.interface import ScaleAnswer, ScaleRequest, ScalingEvent, ScalingLog
from router.scaling.scaler import Autoscaler
from router.server import RouterPlace, RouterServer, bind_http
from router.workers.assignment import RoleDemand
from tests.fuzzing import altered, damaged, fuzz
from tests.worker.harness import tiny_config


def test_a_taken_port_is_one_clear_error() -> None:
    with bind_http("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{port}"):
            RouterPorts(ServeConfig(port=port, router_replicas=2), "127.0.0.1")


def test_a_name_that_no_domain_can_have_is_one_clear_error() -> None:
    with pytest.raises(ConfigError, match=r"--host: cannot use '\.\.'"):
        bind_http("..", 0)


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
        router.process = SimpleNamespace(kill=lambda: None, wait=lambda: None)
        end.setblocking(False)
        return end

    def has_ended(self, index: int) -> bool:
        return self._pool._routers[index].process is None

    def start_first_anew(self) -> None:
        self._ends[0].close()
        self._ends[0] = self._attach(0)

    def says(self, index: int, message: Call) -> list[Call | Answer]:
        """Send a router's message. Return what the router has been sent since its last message."""
        return self.says_raw(index, encode(message))

    def says_raw(self, index: int, message: bytes) -> list[Call | Answer]:
        self._ends[index].send(message)
        self._pool._read(self._pool._routers[index])
        answers: list[Call | Answer] = []
        while True:
            try:
                data = self._ends[index].recv(MAX_MESSAGE_BYTES)
            except BlockingIOError:
                return answers
            if not data:
                return answers
            answers.append(message_decoder.decode(data))

    def asks(self, index: int, prompts: int) -> list[Call | Answer]:
        """Report from a router that this number of prompts was asked for. Return as `says` does."""
        return self.says(index, call(RouterEnd.report, {}, {"decode": RoleDemand(prompts=prompts)}))

    def begins(self, index: int, change: Any) -> str:
        """Let a router ask to begin a change. Return the answer."""
        (answer,) = self.says(index, msgspec.structs.replace(call(RouterEnd.begin, change), number=7))
        assert isinstance(answer, Answer) and answer.number == 7
        return msgspec.msgpack.decode(answer.value, type=str)

    def ends(self, index: int, change: Any) -> None:
        assert self.says(index, call(RouterEnd.end, change)) == []

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


EXPECT = call(RouterServer.expect, {}, {})


def others_asked_for(**prompts: int) -> Call:
    return call(Autoscaler.step, {role: RoleDemand(prompts=number) for role, number in prompts.items()})


def test_one_router_scales_for_all(pool: Pool) -> None:
    """The first router scales by the sum of all requests. When it ends, the next one continues with it."""
    assert pool.asks(1, 5) == [EXPECT, others_asked_for()], "the other one has not begun"
    assert pool.asks(0, 3) == [EXPECT, others_asked_for(decode=5)]
    assert pool.asks(1, 7) == []
    pool.lose(0)
    assert pool.asks(1, 8) == [others_asked_for(decode=3)]


def test_every_router_shows_decisions_about_scaling(pool: Pool) -> None:
    """This includes routers started later, and decisions that failed."""
    decision = ScalingDecision({"decode": 2}, {"decode": "many wait"})
    events = [
        ScalingEvent(1.0, ScalingDecision({}, {}, ("decode", "prefill")), {"prefill": 1}),
        ScalingEvent(2.0, decision, {"decode": 1}),
        ScalingEvent(2.0, decision, {"decode": 1}, "no node came"),
    ]
    changed, scaled, failed = (call(ScalingLog.note, event) for event in events)
    pool.asks(0, 0)
    for event, told in zip(events, (changed, scaled, failed), strict=True):
        assert pool.says(0, call(RouterEnd.note, event)) == [told]
    assert pool.asks(1, 0) == [changed, scaled, failed, EXPECT, changed, failed]


def test_every_router_knows_the_adapters(pool: Pool) -> None:
    """This includes routers started later. Workers begin with the adapter "sql"."""
    new = call(AdapterTable.apply, "new", Adapter(name="new", path="/adapters/new", digest="1" * 32))
    gone, unloaded = call(AdapterTable.apply, "new", None), call(AdapterTable.apply, "sql", None)

    def told(index: int) -> list[Call | Answer]:
        return [each for each in pool.asks(index, 0) if isinstance(each, Call) and each.name == "apply"]

    assert told(0) == told(1) == []
    assert pool.says(0, new) == pool.says(0, unloaded) == []
    assert told(1) == [new, unloaded]
    pool.lose(0)
    pool.start_first_anew()
    assert told(0) == [new, unloaded]
    assert pool.says(1, gone) == []
    assert told(0) == [gone]
    pool.lose(0)
    pool.start_first_anew()
    assert told(0) == [unloaded]


def test_a_long_list_of_adapters_is_sent_in_parts(pool: Pool) -> None:
    pool.asks(0, 0)
    path = "/" * 4000
    names = map(str, range(200))
    changes = [call(RouterEnd.apply, name, Adapter(name=name, path=path, digest="1" * 32)) for name in names]
    for change in changes:
        pool.says(0, change)
    told = [each for _ in range(10) for each in pool.asks(1, 0)]
    assert [each for each in told if isinstance(each, Call) and each.name == "apply"] == changes


def test_routers_take_turns_with_changes_of_many_workers(pool: Pool) -> None:
    """One restart runs at a time, without scaling or autoscaling meanwhile. It ends if its router is lost."""
    pool.asks(0, 0)
    assert pool.begins(0, "restart") == ""
    restarts = "a restart is under way already, asked of router-0: ask again after that"
    assert pool.begins(1, "restart") == pool.begins(1, "scaling") == restarts
    assert pool.asks(0, 1) == [], "nobody is to decide now"
    pool.ends(0, "restart")
    assert pool.asks(0, 1) == [others_asked_for()]
    assert pool.begins(1, "scaling") == pool.begins(0, "scaling") == ""
    pool.ends(0, "scaling")
    assert pool.begins(0, "restart").startswith("a scaling is under way already, asked of router-1")
    pool.lose(1)
    assert pool.begins(0, "restart") == ""


def test_one_router_at_a_time_changes_adapters(pool: Pool) -> None:
    """Changes of workers may run at the same time."""
    change = "change of adapters"
    assert pool.begins(0, change) == pool.begins(1, "restart") == ""
    assert pool.begins(1, change).startswith("a change of adapters is under way already, asked of router-0")
    pool.ends(0, change)
    assert pool.begins(1, change) == ""


def test_a_stop_does_not_wait_for_routers_that_are_starting(pool: Pool) -> None:
    """Starting routers read no messages, and starting may take as long as a tokenizer's download."""
    pool.asks(0, 0)
    pool.stop()
    assert (pool.has_ended(0), pool.has_ended(1)) == (False, True)


DEMAND = {"decode": RoleDemand(prompts=3, prompt_s=0.5)}
EVENT = ScalingEvent(1.0, ScalingDecision({"decode": 2}, {"decode": "why"}), {"decode": 1})
FROM_ROUTER = [
    call(RouterEnd.report, {"decode-0": KnownWorker("i", 0.5, {"host": "h"})}, DEMAND),
    call(RouterEnd.let_go, "decode-0", True),
    call(RouterEnd.renew, "decode-0", "prefill", "i"),
    call(RouterEnd.scale, ScaleRequest(targets={"decode": 2}, worth=["decode-0"])),
    call(RouterEnd.begin, "restart"),
    call(RouterEnd.end, "restart"),
    call(RouterEnd.note, EVENT),
    call(RouterEnd.cannot_start, "why"),
]
TO_ROUTER = [
    call(RouterServer.mark_dead, "decode-0", "i", "why"),
    call(RouterServer.expect, {"decode-0": "decode"}, {"decode": 1}),
    Answer(0, msgspec.Raw(encode(""))),
    Answer(0, msgspec.Raw(encode(ScaleAnswer(started=["decode-1"])))),
    call(ScalingLog.note, EVENT),
    call(RouterServer.gave_up, "decode-1", "why"),
    call(Autoscaler.step, DEMAND),
    call(RouterServer.stop),
]


def test_a_launcher_that_was_held_up_blames_no_router(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its wait for messages ends without one, and only an hour later it goes on."""
    for index in (0, 1):
        pool.asks(index, prompts=0)
    clock, held_up_s = time.monotonic, 0.0

    def select(timeout_s: float) -> list[Any]:
        nonlocal held_up_s
        held_up_s = 3600.0
        return []

    monkeypatch.setattr(time, "monotonic", lambda: clock() + held_up_s)
    with monkeypatch.context() as change:
        change.setattr(pool._pool._selector, "select", select)
        pool._pool._watch()
    assert not (pool.has_ended(0) or pool.has_ended(1))
    pool._ends[0].send(encode(call(RouterEnd.report, {}, {})))
    pool._pool._watch()
    assert (pool.has_ended(0), pool.has_ended(1)) == (False, True), "router 1 has sent nothing since"


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
            pool.start_first_anew()
        pool.asks(1, 1)
        assert not pool.has_ended(1)

    whole = [
        encode(msgspec.structs.replace(message, number=number))
        for message in FROM_ROUTER
        for number in (None, 1)
    ]
    fuzz(check, damaged(whole) | altered(whole), examples=300)
    assert num_ended > 20
    pool.lose(0)
    pool.start_first_anew()
    assert pool.begins(1, "restart") == ""


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

        check(encode(Answer(1, msgspec.Raw(encode("")))))
        check(whole[0][:-1])
        check(encode(Answer(0, msgspec.Raw(encode("it stays")))))
        assert await waiting == "it stays"
        fuzz(check, damaged(whole) | altered(whole), examples=300)

    with ours, theirs, closing(RouterServer(config, ClusterKeys.generate(), place=place)) as server:
        asyncio.run(say([encode(message) for message in TO_ROUTER]))
        server.expect({"decode-0": "decode"})
        assert server.state.registry.awaited() == ["decode-0"]
