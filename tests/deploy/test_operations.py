"""A server of two routers under load is restarted and scaled and loses routers; no token changes."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from typer.testing import CliRunner, Result

from deploy.cli import app
from tests.deploy.server_process import ANSWER_S, ServerProcess, read_events, write_strange_modules
from tests.engine.adapter_files import write_adapter

KEY = {"authorization": "Bearer secret"}
OPTIONS = ("--router-replicas", "2", "--decode-replicas", "2", "--placement", "least_loaded", "--enable-lora")
OPTIONS += ("--api-key", "secret", "--scale-timeout", "20")
RESTART_S = 120.0
PAUSE_S = 0.3
"""Pause after an answer: requests run at all times, but leave cores to starting workers."""

REQUESTS = [{"prompt": [5, 6, 7 + seed], "seed": seed, "temperature": seed / 2} for seed in range(2)]
STREAM = {"prompt": [5, 6, 7], "max_tokens": 100, "ignore_eos": True, "stream": True, "temperature": 0}


@pytest.fixture(scope="module")
def strange(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_strange_modules(tmp_path_factory.mktemp("operations") / "strange")


@pytest.fixture(scope="module")
def running(tiny_folder: Path, strange: Path) -> Iterator[ServerProcess]:
    with ServerProcess(tiny_folder, strange.parent / "log", *OPTIONS, folder=strange) as server:
        yield server.wait_ready()


@pytest.fixture
def server(running: ServerProcess) -> ServerProcess:
    """Restore one prefill and two decode workers, whatever the test before has done."""
    if roles(running) != ["decode", "decode", "prefill"]:
        done = scale(running, "--decode", "2", "--prefill", "1")
        assert done.exit_code == 0, done.output
        running.wait(lambda: num_workers(running, 0) == num_workers(running, 1) == 3, 30)
    return running


def own_url(server: ServerProcess, index: int) -> str:
    port = urlsplit(server.url).port
    assert port is not None
    return f"http://127.0.0.1:{port + 1 + index}"


def get(server: ServerProcess, index: int, path: str) -> Any:
    return httpx.get(f"{own_url(server, index)}/{path}", headers=KEY, timeout=ANSWER_S).json()


def of_both(server: ServerProcess, *paths: str, **body: Any) -> tuple[httpx.Response, httpx.Response]:
    """Post to both routers at the same moment. Return the first successful answer."""

    def post(index: int) -> httpx.Response:
        url = f"{own_url(server, index)}/{paths[index]}"
        return httpx.post(url, json=body, headers=KEY, timeout=RESTART_S)

    with ThreadPoolExecutor(2) as pool:
        done, refused = sorted(pool.map(post, range(2)), key=lambda answer: answer.status_code)
    assert (done.status_code, refused.status_code) == (200, 409), done.text + refused.text + server.log
    return done, refused


def num_workers(server: ServerProcess, index: int) -> int:
    try:
        return len(get(server, index, "workers")["workers"])
    except httpx.TransportError:
        return 0


def knows(server: ServerProcess, index: int, adapter: str) -> bool:
    return adapter in [card["id"] for card in get(server, index, "v1/models")["data"]]


def pids(server: ServerProcess) -> dict[str, int]:
    """Return the process ids of ready workers."""
    workers = get(server, 0, "workers")["workers"]
    return {worker["id"]: worker["pid"] for worker in workers if worker["lifecycle"] == "ready"}


def roles(server: ServerProcess) -> list[str]:
    return sorted(name.partition("-")[0] for name in pids(server))


def complete(server: ServerProcess, request: dict[str, Any]) -> list[int]:
    body = {"model": "tiny", "max_tokens": 40, "ignore_eos": True, "return_token_ids": True, **request}
    answer = httpx.post(f"{server.url}/v1/completions", json=body, headers=KEY, timeout=ANSWER_S)
    assert answer.status_code == 200, answer.text
    tokens: list[int] = answer.json()["choices"][0]["token_ids"]
    return tokens


@contextmanager
def under_requests(server: ServerProcess) -> Iterator[None]:
    expected = [complete(server, request) for request in REQUESTS]
    is_over = threading.Event()

    def ask_again_and_again(number: int) -> int:
        count = 0
        while not is_over.is_set():
            assert complete(server, REQUESTS[number]) == expected[number]
            count += 1
            is_over.wait(PAUSE_S)
        return count

    with ThreadPoolExecutor(len(REQUESTS)) as pool:
        askers = [pool.submit(ask_again_and_again, number) for number in range(len(REQUESTS))]
        try:
            yield
        finally:
            is_over.set()
        assert all(asker.result(60) > 0 for asker in askers)


def scale(server: ServerProcess, *targets: str, key: str = "secret") -> Result:
    return CliRunner().invoke(app, ["scale", *targets, "--url", server.url, "--api-key", key])


def test_only_the_connections_of_a_lost_router_break(
    server: ServerProcess, tiny_folder: Path, tmp_path: Path
) -> None:
    """The router's knowledge of adapters survives, too."""
    server.wait(lambda: num_workers(server, 0) == num_workers(server, 1) == 3, 30)

    def open_stream(index: int, **fields: int) -> AbstractContextManager[httpx.Response]:
        url = f"{own_url(server, index)}/v1/completions"
        return httpx.stream("POST", url, json=STREAM | fields, headers=KEY, timeout=ANSWER_S)

    def stream(index: int) -> str:
        with open_stream(index) as response:
            return "".join(event["choices"][0]["text"] for event in read_events(response))

    whole = stream(1)
    adapter = write_adapter(tiny_folder, tmp_path / "sql", 1)
    body = {"lora_name": "sql", "lora_path": str(adapter)}
    url = f"{own_url(server, 0)}/v1/load_lora_adapter"
    loaded = httpx.post(url, json=body, headers=KEY, timeout=ANSWER_S)
    assert loaded.status_code == 200, loaded.text
    server.wait(lambda: knows(server, 1, "sql"), 30)
    for number in (signal.SIGKILL, signal.SIGSTOP):
        before = get(server, 0, "workers")["router"]
        with ThreadPoolExecutor(1) as pool, open_stream(0, max_tokens=300) as lost:
            kept, lines = pool.submit(stream, 1), lost.iter_lines()
            next(lines)
            os.kill(before["pid"], number)
            with pytest.raises(httpx.TransportError):
                list(lines)
            assert kept.result() == whole
        assert len(complete(server, REQUESTS[0])) == 40
        server.wait(lambda: num_workers(server, 0) == 3, 30)
        after = get(server, 0, "workers")["router"]
        assert after["id"] == "router-0" and after["incarnation"] != before["incarnation"]
        assert stream(0) == whole
        server.wait(lambda: knows(server, 0, "sql"), 30)
    assert server.log.count("router router-0 ended") == 2


def test_all_workers_are_restarted_once_when_both_routers_are_asked(server: ServerProcess) -> None:
    before, logged = pids(server), len(server.log)
    with under_requests(server):
        done, refused = of_both(server, "restart", "restart")
        again = httpx.post(f"{server.url}/restart", json={"soon": True}, headers=KEY, timeout=ANSWER_S)
    only, *decode = sorted(before, key=lambda name: (name.startswith("decode"), name))
    assert done.json()["restarted"] == [only, *decode]
    (successor,) = done.json()["successors"]
    assert successor.startswith("prefill") and successor not in before, "it served before the only one left"
    assert "a restart is under way already, asked of router-" in refused.text
    assert again.status_code == 400
    after = pids(server)
    assert after.keys() == {successor, *decode}
    assert not {*before.values()} & {*after.values()}
    assert " E " not in server.log[logged:], server.log


def test_one_decode_worker_stays_when_both_are_drained(server: ServerProcess) -> None:
    decode = [name for name in pids(server) if name.startswith("decode")]
    with under_requests(server):
        of_both(server, *(f"workers/{name}/drain" for name in decode))
    server.wait(lambda: len(pids(server)) == 2, 30)
    assert roles(server) == ["decode", "prefill"]


def test_workers_are_added_and_removed(server: ServerProcess) -> None:
    with under_requests(server):
        grown = scale(server, "--decode", "3", "--prefill", "2")
        assert grown.exit_code == 0, grown.output
        assert "started: " in grown.output
        assert roles(server) == ["decode"] * 3 + ["prefill"] * 2
        shrunk = scale(server, "--decode", "1", "--prefill", "1")
        assert shrunk.exit_code == 0, shrunk.output
        assert "drained: " in shrunk.output
        server.wait(lambda: len(pids(server)) == 2, 30)


@pytest.mark.parametrize(
    ("targets", "reason"),
    [(["--decode", "many"], "Invalid value for '--decode'"), ([], "name a role at least: --prefill N")],
)
def test_invalid_commands_are_refused_before_a_server_is_asked(targets: list[str], reason: str) -> None:
    answer = CliRunner().invoke(app, ["scale", *targets, "--url", "http://127.0.0.1:1"])
    assert (answer.exit_code, reason in answer.output) == (2, True), answer.output


def test_impossible_operations_are_refused(running: ServerProcess) -> None:
    before = pids(running)
    refused = {
        ("--decode", "0"): "decode: must be at least 1, got 0",
        ("--decode", "-2"): "decode: must be from 0 to 4096, got -2",
        ("--prefill", "4000"): "prefill: the nodes take at most",
        ("--draft", "1"): "draft: needs --speculative-config",
    }
    for targets, reason in refused.items():
        answer = scale(running, *targets)
        assert (answer.exit_code, reason in answer.output) == (1, True), answer.output
    assert "401" in scale(running, "--decode", "2", key="other").output
    unknown = httpx.post(f"{running.url}/scale", json={"cook": 1}, headers=KEY, timeout=ANSWER_S)
    assert (unknown.status_code, "cook" in unknown.text) == (400, True)
    assert pids(running) == before


def test_no_process_imports_from_the_working_folder(server: ServerProcess, strange: Path) -> None:
    """Routers, workers and all else have been started anew by now."""
    assert [path.name for path in strange.glob("*.imported")] == []


def test_a_signal_to_the_process_alone_ends_it_quietly(running: ServerProcess) -> None:
    """The last test of this module."""
    before = len(running.log.splitlines())
    running.look()
    running.process.send_signal(signal.SIGTERM)
    assert running.wait_end() == 0
    ours = (" router.server: ", " deploy.launcher: stopping; ")
    of_ray = [line for line in running.log.splitlines()[before:] if not any(part in line for part in ours)]
    assert [line for line in of_ray if not line.startswith("(WorkerActor ")] == []
    assert running.leftovers() == []
