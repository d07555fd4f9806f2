"""Starting workers: the supervisor asks their actors about progress, and waits with a limit."""

from __future__ import annotations

import logging
import os
import sys
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import ray

from deploy import slot_actors
from deploy.actors import ActorState, WorkerActor
from deploy.slot_actors import ANSWER_S, FIRST_ANSWER_S, REMIND_S, StartFault, StartWatch
from deploy.slots import Slot
from messaging.sockets import ClusterKeys
from protocol.config import ServeConfig
from protocol.roles import ROLES
from protocol.version import version
from worker.launch import Launch

LIMIT_S = 300.0
PID = os.getpid()


class Start:
    """A starting worker. The test acts as its actor, and time passes in the supervisor's steps."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, is_local: bool = True) -> None:
        self.answer: ActorState | None = None
        self.num_asked, self.num_templates = 0, 0
        monkeypatch.setattr(
            slot_actors.ray, "wait", lambda refs, timeout: (refs if self.answer is not None else [], [])
        )
        monkeypatch.setattr(slot_actors.ray, "get", lambda ref: self.answer)
        config = ServeConfig(start_timeout=LIMIT_S)
        self.watch = StartWatch(config, is_local, self._on_replaced)
        self.slot = Slot("decode-0", ROLES["decode"], actor=SimpleNamespace(look=self))
        self.now = self.slot.started = 1000.0
        self.watch.begin(self.slot, self.now)

    def remote(self) -> Any:
        self.num_asked += 1
        return object()

    def _on_replaced(self) -> None:
        self.num_templates += 1

    def after(self, seconds: float) -> StartFault | None:
        """Return what is found within this time, as soon as it is found."""
        end = self.now + seconds
        while self.now < end:
            self.now += 0.25
            self.watch.take(self.slot)
            if (fault := self.watch.judge(self.slot, self.now)) is not None:
                return fault
        return None


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Start:
    return Start(monkeypatch)


def test_an_actor_that_answers_is_waited_for_up_to_the_time_limit(start: Start) -> None:
    start.answer = ActorState(PID, "process 7 (running) to get its model ready")
    assert start.after(LIMIT_S) is None
    assert LIMIT_S / 3 < start.num_asked < LIMIT_S
    fault = start.after(1)
    assert fault == StartFault("it was not ready within 300 s (--start-timeout)", is_over=True)


def test_an_actor_that_falls_silent_during_the_start_fails(start: Start) -> None:
    start.answer = ActorState(PID)
    assert start.after(5) is None
    start.answer = None
    assert start.after(ANSWER_S) is None
    fault = start.after(3)
    assert fault == StartFault("its actor has not answered for 10 s", by_actor=True)


def test_ray_has_more_time_to_begin_an_actor(start: Start) -> None:
    assert start.after(FIRST_ANSWER_S) is None
    fault = start.after(1)
    assert fault is not None and fault.by_actor


def test_an_actors_next_start_knows_that_it_has_answered_before(start: Start) -> None:
    start.answer = ActorState(PID, "something", stuck="process 7 is stopped (SIGSTOP)")
    start.watch.take(start.slot)
    start.answer = None
    start.slot.started = start.now
    start.watch.begin(start.slot, start.now)
    assert start.after(ANSWER_S) is None, "what was stopped then has ended"
    assert start.after(1) == StartFault("its actor has not answered for 10 s", by_actor=True)


def test_a_worker_that_is_stopped_while_it_starts_is_ended(start: Start) -> None:
    start.answer = ActorState(PID, stuck="process 7 is stopped (SIGSTOP)")
    assert start.after(1) == StartFault("its process 7 is stopped (SIGSTOP)")


def test_replaced_templates_are_reported_once(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    start.answer = ActorState(PID, replaced=("process 7 is stopped (SIGSTOP)",))
    start.after(10)
    assert start.num_templates == 1
    start.answer = ActorState(
        PID, replaced=("process 7 is stopped (SIGSTOP)", "process 8 has not answered for 9 s")
    )
    start.after(10)
    assert start.num_templates == 2
    told = [record.message for record in caplog.records if "template" in record.message]
    assert told == [
        "the template that worker decode-0 waits for is replaced: process 7 is stopped (SIGSTOP)",
        "the template that worker decode-0 waits for is replaced: process 8 has not answered for 9 s",
    ]


def test_the_log_says_what_a_start_waits_for(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    start.after(REMIND_S - 0.5)
    assert not caplog.records
    start.after(1)
    start.answer = ActorState(PID, "its host's template (process 7, running) for 9 s")
    start.after(REMIND_S)
    start.answer = None
    start.after(REMIND_S + 0.5)
    assert [record.message for record in caplog.records] == [
        "worker decode-0, started 10 s ago, waits for Ray to start its actor",
        "worker decode-0, started 20 s ago, waits for its host's template (process 7, running) for 9 s",
        f"worker decode-0, started 31 s ago, waits for its actor (process {PID}) to answer",
    ]


@pytest.mark.parametrize("is_local", [True, False])
def test_an_actor_of_this_host_is_known_by_its_process(
    monkeypatch: pytest.MonkeyPatch, is_local: bool
) -> None:
    start = Start(monkeypatch, is_local)
    start.answer = ActorState(PID)
    start.after(1)
    assert (start.slot.process is not None) == is_local


def test_an_ended_actor_counts_as_no_answer(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    def die(ref: Any) -> None:
        raise ray.exceptions.ActorDiedError

    start.answer = ActorState(PID)
    monkeypatch.setattr(slot_actors.ray, "get", die)
    assert start.after(1) is None and start.slot.seen is None


def launch_with(**fields: Any) -> Launch:
    endpoints, keys = ["tcp://127.0.0.1:1"], ClusterKeys.generate()
    about: dict[str, Any] = {"config": ServeConfig(), **fields}
    return Launch(role=ROLES["decode"], worker_id="decode-0", router_endpoints=endpoints, keys=keys, **about)


def test_an_actor_that_cannot_import_the_worker_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "worker.process", None)
    encoded = msgspec.msgpack.encode(launch_with(config=ServeConfig(kv_transports="object_store")))
    end = WorkerActor("unused", {}, False, 0).run(encoded)
    assert end.reason.startswith("ModuleNotFoundError: ") and not end.was_killed


def test_a_node_with_another_tandem_starts_no_worker() -> None:
    launch = msgspec.to_builtins(launch_with(release="9.8"))
    actor = WorkerActor("unused", {}, False, 0)
    for told in (launch, launch | {"role": "of another kind"}):
        end = actor.run(msgspec.msgpack.encode(told))
        assert not end.was_killed
        assert f"has Tandem {version()}, the server Tandem 9.8" in end.reason
