"""The end of a joined Ray cluster is noticed at once, and a short outage is none."""

from __future__ import annotations

import queue
import socket
import time
from types import SimpleNamespace

import pytest

from deploy import head_watch
from deploy.head_watch import HeadWatch


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head_watch, "INTERVAL_S", 0.02)


def listen(port: int = 0) -> socket.socket:
    listener = socket.create_server(("127.0.0.1", port))
    listener.settimeout(10)
    return listener


def test_a_head_that_refuses_connections_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head_watch, "REFUSED_S", 0.1)
    listener = listen()
    port = listener.getsockname()[1]
    lost: queue.Queue[str] = queue.Queue()
    watch = HeadWatch("127.0.0.1", port, lost.put)
    watch.start()
    for _ in range(3):
        listener.accept()[0].close()
    assert lost.empty()
    listener.close()
    assert lost.get(timeout=10).startswith(f"the Ray cluster at 127.0.0.1:{port} has ended (")
    watch.join(10)
    assert not watch.is_alive() and lost.empty()


def test_one_that_comes_back_in_time_has_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long it had answered before."""
    clock = [0.0]
    monkeypatch.setattr(head_watch, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    listener = listen()
    port = listener.getsockname()[1]
    lost: queue.Queue[str] = queue.Queue()
    watch = HeadWatch("127.0.0.1", port, lost.put)
    watch.start()
    listener.accept()[0].close()
    clock[0] = 100.0
    for _ in range(2):
        listener.accept()[0].close()
    listener.close()
    time.sleep(0.1)  # some refusals
    with listen(port) as again:
        again.accept()[0].close()
    watch.stop()
    watch.join(10)
    assert not watch.is_alive() and lost.empty()


def test_one_that_cannot_be_reached_gets_more_time(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(*_: object) -> socket.socket:
        raise OSError("no route to host")

    monkeypatch.setattr(head_watch, "REFUSED_S", 0.0)
    monkeypatch.setattr(head_watch, "UNREACHABLE_S", 0.3)
    monkeypatch.setattr(socket, "create_connection", unreachable)
    lost: queue.Queue[str] = queue.Queue()
    began = time.monotonic()
    watch = HeadWatch("192.0.2.1", 6379, lost.put)
    watch.start()
    assert "no route to host" in lost.get(timeout=10)
    assert time.monotonic() - began >= 0.3
