"""Processes of Ray die or stand still under a server: its workers continue, and clients notice nothing."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.deploy.server_process import ServerProcess

pytestmark = [pytest.mark.timeout(240)]

PROMPT = list(range(1, 60))


@pytest.fixture(scope="module")
def server(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    running = ServerProcess(tiny_folder, tmp_path_factory.mktemp("ray") / "log")
    try:
        yield running.wait_ready()
    finally:
        running.kill()


@pytest.mark.parametrize(
    ("name", "number", "adopted"),
    [
        ("gcs_server", signal.SIGKILL, 2),
        ("raylet", signal.SIGKILL, 2),
        ("raylet", signal.SIGSTOP, 2),
        ("ray::WorkerActor", signal.SIGKILL, 1),
    ],
    ids=["gcs", "raylet", "frozen raylet", "actor"],
)
def test_workers_continue(server: ServerProcess, name: str, number: signal.Signals, adopted: int) -> None:
    """Afterwards both are restarted as ever."""
    workers, told = server.workers(), server.log.count("continues with another actor")
    expected = server.complete(PROMPT, max_tokens=20).json()["choices"]
    os.kill(next(each for each in server.alive() if name in each.name()).pid, number)

    def is_over() -> bool:
        answer = server.complete(PROMPT, max_tokens=20)
        assert answer.json().get("choices") == expected, answer.text
        return server.log.count("continues with another actor") == told + adopted

    server.wait(is_over, 60)
    assert {name: each["pid"] for name, each in server.workers().items()} == {
        name: each["pid"] for name, each in workers.items()
    }
    for worker_id, worker in workers.items():
        os.kill(worker["pid"], signal.SIGKILL)

        def is_back(worker_id: str = worker_id, pid: int = worker["pid"]) -> bool:
            other = server.workers().get(worker_id)
            return other is not None and other["pid"] != pid and other["lifecycle"] == "ready"

        server.wait(is_back, 60)


def test_nothing_outlives_the_launcher(server: ServerProcess) -> None:
    """The last test of this module: it ends the shared server."""
    server.end_without_launcher()
