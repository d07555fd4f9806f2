"""A host's template is stopped, stuck, or answers with fuzzed messages: its clients wait only briefly."""

from __future__ import annotations

import os
import re
import secrets
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import closing, nullcontext, suppress
from types import SimpleNamespace
from typing import Any

import msgspec
import psutil
import pytest
from hypothesis import strategies as st

from deploy import processes
from deploy.processes import IDLE_S, STOPPED_S, ProcessWatch
from deploy.template import client as template_client
from deploy.template.client import (
    MAX_MESSAGE_BYTES,
    Ended,
    Spawned,
    SpawnFailed,
    TemplateClient,
    TemplateError,
    TemplateReply,
    WorkerExit,
)
from tests.fuzzing import altered, damaged, fuzz
from tests.processes import is_running

WORKER_PID = 7
PATIENCE_S = 60.0


class Templates:
    """Processes that act as templates: some never answer, others have started a worker."""

    def __init__(self) -> None:
        self.pids: list[int] = []

    def start(self, name: str, answers: bool) -> psutil.Process:
        ready, told = os.pipe()
        pid = os.fork()
        if pid == 0:
            with suppress(BaseException):
                self._serve(name, answers, told)
            os._exit(1)
        os.close(told)
        assert os.read(ready, 1)
        os.close(ready)
        self.pids.append(pid)
        return psutil.Process(pid)

    def _serve(self, name: str, answers: bool, told: int) -> None:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        listener.bind(f"\0{name}")
        listener.listen()
        os.write(told, b"x")
        clients = []
        while True:
            client, _ = listener.accept()
            clients.append(client)
            if answers:
                client.recv(MAX_MESSAGE_BYTES)
                workers, control = socket.socketpair()
                workers.close()  # the worker has ended
                with control:
                    socket.send_fds(client, [msgspec.msgpack.encode(Spawned(WORKER_PID))], [control.fileno()])

    def close(self) -> None:
        for pid in self.pids:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


@pytest.fixture
def name() -> str:
    return f"test-{secrets.token_hex(8)}"


@pytest.fixture
def templates(monkeypatch: pytest.MonkeyPatch) -> Iterator[Templates]:
    """Make clients replace a template by one that answers, and check the others often."""
    templates = Templates()
    monkeypatch.setattr(TemplateClient, "_start", lambda client: templates.start(client._name, answers=True))
    monkeypatch.setattr(template_client, "_LOOK_S", 0.02)
    monkeypatch.setattr(processes, "STOPPED_S", 0.2)
    with closing(templates):
        yield templates


def client_of(name: str) -> closing[TemplateClient]:
    return closing(TemplateClient(name, {}, own_stderr=False))


def test_a_stopped_template_is_killed_and_another_one_answers(templates: Templates, name: str) -> None:
    frozen = templates.start(name, answers=True)
    frozen.suspend()
    with client_of(name) as one, client_of(name) as other:
        assert one.spawn(b"launch", PATIENCE_S).pid == WORKER_PID
        assert one.replaced == [f"process {frozen.pid} is stopped (SIGSTOP)"]
        assert not is_running(frozen)
        assert other.spawn(b"launch", PATIENCE_S).pid == WORKER_PID
        assert other.replaced == [] and len(templates.pids) == 2, "both have the new one"


def test_a_template_that_cannot_be_killed_keeps_its_name(
    templates: Templates, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ProcessWatch, "end", lambda watch, timeout_s: False)
    templates.start(name, answers=True).suspend()
    with client_of(name) as one, client_of(name) as other:
        for client in (one, other):
            assert client.spawn(b"launch", PATIENCE_S).pid == WORKER_PID
            assert client._name == f"{name}.1"
        assert len(templates.pids) == 2


def test_a_waiting_template_is_replaced(
    templates: Templates, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "IDLE_S", 0.5)
    stuck = templates.start(name, answers=False)
    with client_of(name) as client:
        assert client.spawn(b"launch", PATIENCE_S).pid == WORKER_PID
        assert f"process {stuck.pid} (sleeping) has used no core for" in client.replaced[0]


def test_a_template_has_a_deadline(templates: Templates, name: str) -> None:
    busy = templates.start(name, answers=False)
    with client_of(name) as client:
        assert client.spawn(b"launch", 1.0).pid == WORKER_PID
        (replaced,) = client.replaced
        assert re.fullmatch(rf"process {busy.pid} has not answered for \d+ s", replaced)


def test_a_workers_end_is_noticed_though_its_template_is_stopped(templates: Templates, name: str) -> None:
    template = templates.start(name, answers=True)
    with client_of(name) as client:
        worker = client.spawn(b"launch", PATIENCE_S)
        template.suspend()
        assert worker.wait().reason == "its process ended"
        assert len(client.replaced) == 1


def test_repeatedly_stuck_templates_are_an_error(
    templates: Templates, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(client: TemplateClient) -> None:
        templates.start(client._name, answers=True).suspend()

    monkeypatch.setattr(TemplateClient, "_start", start)
    with client_of(name) as client, pytest.raises(TemplateError, match=r"is stopped \(SIGSTOP\)"):
        client.spawn(b"launch", PATIENCE_S)
    assert len(templates.pids) == 3


def test_a_template_that_does_not_start_is_an_error(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_client, "_START_TIMEOUT_S", 0.2)
    monkeypatch.setattr(template_client, "_ARGUMENTS", ("-c", "import time; time.sleep(60)"))
    with client_of(name) as client, pytest.raises(TemplateError, match="did not start within 0 s"):
        client.spawn(b"launch", PATIENCE_S)


class Watched:
    """A process whose state the test controls."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.watch = ProcessWatch(os.getpid())
        self.state, self.core_s, self._now = psutil.STATUS_RUNNING, 0.0, 0.0
        self.watch._process = SimpleNamespace(
            pid=1, oneshot=nullcontext, status=lambda: self.state, cpu_times=lambda: (self.core_s, 0, 0, 0, 0)
        )
        self.watch._looked_at = 0.0
        monkeypatch.setattr(processes, "time", SimpleNamespace(monotonic=lambda: self._now))

    def after(self, seconds: float, core_s: float = 0.0, looks: int = 100) -> ProcessWatch:
        for _ in range(looks):
            self._now += seconds / looks
            self.core_s += core_s / looks
            self.watch.look()
        return self.watch


def test_a_working_process_is_never_stuck(monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched(monkeypatch)
    for state in (psutil.STATUS_RUNNING, psutil.STATUS_SLEEPING, psutil.STATUS_DISK_SLEEP):
        watched.state = state
        assert watched.after(600, core_s=1.0, looks=600).stuck == ""


def test_a_waiting_process_is_stuck_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched(monkeypatch)
    watched.state = psutil.STATUS_DISK_SLEEP
    assert watched.after(IDLE_S - 2).stuck == ""
    assert "(disk-sleep) has used no core for 15" in watched.after(5).stuck
    assert watched.after(1, core_s=0.1).stuck == "", "it goes on"


@pytest.mark.parametrize("state", [psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP])
def test_a_stopped_process_is_stuck_soon(monkeypatch: pytest.MonkeyPatch, state: Any) -> None:
    watched = Watched(monkeypatch)
    watched.state = state
    assert watched.after(STOPPED_S - 0.5).stopped == ""
    assert watched.after(1).stopped == watched.watch.stuck != ""
    watched.state = psutil.STATUS_SLEEPING
    assert watched.after(1).stopped == ""


def test_a_stopped_observer_does_not_blame_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both continue now, and the first look finds the process unchanged."""
    watched = Watched(monkeypatch)
    watched.state = psutil.STATUS_STOPPED
    assert watched.after(3600, looks=1).stuck == ""


def test_an_ended_process_is_not_called_stuck() -> None:
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    watch = ProcessWatch(pid)
    os.waitpid(pid, 0)
    watch.look()
    assert watch.stuck == "" and watch.end(0.1)


def test_a_workers_end_is_reported_by_the_template(templates: Templates, name: str) -> None:
    """The template still reports the worker's status."""
    raw = msgspec.msgpack.encode(Ended(WORKER_PID, 9))
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with client_of(name) as client, theirs:
        client._connection = ours
        theirs.send(raw)
        assert client.status(WORKER_PID) == 9
        assert client.waits_for == ""


REPLIES: list[TemplateReply] = [Spawned(7), SpawnFailed("why"), Ended(7, 9)]


def test_fuzz_the_template(name: str) -> None:
    """A client gets an answer or one of our own errors. `test_template` fuzzes the clients."""
    replies: list[bytes] = []

    def serve() -> None:
        with suppress(OSError):  # the test is over
            while True:
                connection, _ = listener.accept()
                workers, control = socket.socketpair()
                with workers, control, connection, suppress(ConnectionError):  # the client has hung up
                    connection.recv(MAX_MESSAGE_BYTES)
                    for reply in replies:
                        socket.send_fds(connection, [reply], [control.fileno()])

    def check(example: list[bytes]) -> None:
        replies[:] = example
        with client_of(name) as client, suppress(TemplateError):
            assert isinstance(client.spawn(b"launch", 60.0).wait(), WorkerExit)

    raw = [msgspec.msgpack.encode(reply) for reply in REPLIES]
    first = st.sampled_from(raw) | damaged(raw) | altered(raw)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(f"\0{name}")
        listener.listen()
        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        num_fds = psutil.Process().num_fds()
        check([raw[0], msgspec.msgpack.encode(Ended(7, 40))])
        fuzz(check, st.lists(first, max_size=2), examples=200)
        assert psutil.Process().num_fds() <= num_fds + 2
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()
