"""A rolling restart of a real server under load: no request fails, the tokens are the same. Then it ends."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.deploy.server_process import ServerProcess

pytestmark = [pytest.mark.timeout(240)]

CLIENTS = 4
RESTART_S = 120.0
PAUSE_S = 0.1
"""As in `test_scale`."""


@pytest.fixture(scope="module")
def server(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    log = tmp_path_factory.mktemp("restart") / "log"
    server = ServerProcess(tiny_folder, log, "--decode-replicas", "2", "--placement", "least_loaded")
    try:
        yield server.wait_ready()
    finally:
        server.kill()


def ask(server: ServerProcess, seed: int) -> str:
    prompt = [3 + (seed * 7 + place) % 200 for place in range(40)]
    answer = server.complete(prompt, max_tokens=60, temperature=0.8, seed=seed)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["text"])


def test_all_workers_are_restarted_under_load(server: ServerProcess) -> None:
    before = server.workers()
    expected = [ask(server, seed) for seed in range(CLIENTS)]
    done = threading.Event()

    def keep_asking(seed: int) -> list[str]:
        answers = []
        while not done.is_set():
            answers.append(ask(server, seed))
            done.wait(PAUSE_S)
        return answers

    with ThreadPoolExecutor(CLIENTS) as clients:
        running = [clients.submit(keep_asking, seed) for seed in range(CLIENTS)]
        try:
            answer = httpx.post(f"{server.url}/restart", json={}, timeout=RESTART_S)
            again = httpx.post(f"{server.url}/restart", json={"soon": True}, timeout=10)
        finally:
            done.set()
        seen = [future.result(60) for future in running]
    assert answer.status_code == 200, answer.text + server.log
    assert answer.json()["restarted"] == ["prefill-0", "decode-0", "decode-1"]
    assert answer.json()["successors"] == ["prefill-1"], "it served before the only one left"
    assert again.status_code == 400
    for texts, text in zip(seen, expected, strict=True):
        assert texts and set(texts) == {text}
    after = server.workers()
    assert after.keys() == {"prefill-1", "decode-0", "decode-1"}
    assert not {worker["pid"] for worker in before.values()} & {worker["pid"] for worker in after.values()}
    assert " E " not in server.log, server.log


def test_a_signal_to_the_process_alone_ends_it_quietly(server: ServerProcess) -> None:
    """Last in this module."""
    before = len(server.log.splitlines())
    server.look()
    server.process.send_signal(signal.SIGTERM)
    assert server.wait_end() == 0
    ours = (" router.server: ", " deploy.serve: stopping; ")
    of_ray = [line for line in server.log.splitlines()[before:] if not any(part in line for part in ours)]
    assert [line for line in of_ray if not line.startswith("(WorkerActor ")] == []
    assert server.leftovers() == []
