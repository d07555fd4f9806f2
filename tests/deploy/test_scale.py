"""`tandem scale` under streams: workers come and go, and the tokens are those that they would have been."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.deploy.server_process import ROOT, ServerProcess, tandem_command

KEY = {"authorization": "Bearer secret"}
PAUSE_S = 0.2
"""After an answer: requests run at all times, and leave the cores to workers that start."""

REQUESTS = [{"prompt": [5, 6, 7 + seed], "seed": seed, "temperature": seed / 2} for seed in range(4)]


@pytest.fixture
def server(tiny_folder: Path, tmp_path: Path) -> Iterator[ServerProcess]:
    options = ("--router-replicas", "2", "--api-key", "secret", "--scale-timeout", "20")
    server = ServerProcess(tiny_folder, tmp_path / "log", *options)
    yield server.wait_ready()
    server.kill()


def scale(server: ServerProcess, *targets: str, key: str = "secret") -> subprocess.CompletedProcess[str]:
    command = tandem_command("scale", *targets, "--url", server.url, "--api-key", key)
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)


def complete(server: ServerProcess, request: dict[str, Any]) -> list[int]:
    body = {"model": "tiny", "max_tokens": 200, "ignore_eos": True, "return_token_ids": True, **request}
    answer = httpx.post(f"{server.url}/v1/completions", json=body, headers=KEY, timeout=60)
    assert answer.status_code == 200, answer.text
    tokens: list[int] = answer.json()["choices"][0]["token_ids"]
    return tokens


def ready(server: ServerProcess) -> set[str]:
    workers = httpx.get(f"{server.url}/workers", headers=KEY, timeout=10).json()["workers"]
    return {worker["id"] for worker in workers if worker["lifecycle"] == "ready"}


def test_workers_come_and_go_under_requests(server: ServerProcess) -> None:
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
            grown = scale(server, "--decode", "3", "--prefill", "2")
            assert grown.returncode == 0, grown.stderr
            assert "started: " in grown.stdout
            assert ready(server) == {"prefill-0", "prefill-1", "decode-0", "decode-1", "decode-2"}
            shrunk = scale(server, "--decode", "1", "--prefill", "1")
            assert shrunk.returncode == 0, shrunk.stderr
            assert "drained: " in shrunk.stdout
            server.wait(lambda: len(ready(server)) == 2, 10)
        finally:
            is_over.set()
        assert all(asker.result(60) > 0 for asker in askers)
    refused = {
        ("--decode", "0"): "decode: must be at least 1, got 0",
        ("--decode", "-2"): "decode: must be from 0 to 4096, got -2",
        ("--decode", "many"): "--decode: must be a whole number of workers, got 'many'",
        ("--prefill", "4000"): "prefill: the nodes take at most",
        ("--draft", "1"): "draft: needs --speculative-config",
        (): "name a role at least: --prefill N",
    }
    for targets, reason in refused.items():
        answer = scale(server, *targets)
        assert (answer.returncode, reason in answer.stderr) == (1, True), answer.stderr
    assert "401" in scale(server, "--decode", "2", key="other").stderr
    unknown = httpx.post(f"{server.url}/scale", json={"cook": 1}, headers=KEY, timeout=10)
    assert (unknown.status_code, "cook" in unknown.text) == (400, True)
    assert len(ready(server)) == 2
    server.end_without("raylet")
