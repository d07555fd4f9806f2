"""`tandem serve` with KV blocks passing through Ray's object store."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from transformers import PreTrainedModel

from tests.deploy.server_process import ANSWER_S, START_S, ServerProcess, write_served
from tests.worker.tiny_model import VOCAB_SIZE, greedy, load

LENGTHS = [1, 16, 100, 600]


@pytest.fixture(scope="module")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_served(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def reference(tiny_folder: Path) -> PreTrainedModel:
    return load(tiny_folder)


@pytest.fixture(scope="module")
def server(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    options = ["--kv-transports", "object_store", "--placement", "least_loaded"]
    options += ["--max-num-batched-tokens", "128"]
    with ServerProcess(tiny_folder, tmp_path_factory.mktemp("serve") / "log", *options) as running:
        yield running.wait_ready()


def tokens(server: ServerProcess, prompt: list[int], count: int = 12) -> Any:
    answer = server.complete(prompt, max_tokens=count, return_token_ids=True)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["token_ids"]


def counter(server: ServerProcess, name: str) -> float:
    return sum(worker["counters"].get(name, 0.0) for worker in server.workers().values())


def pieces_sent(server: ServerProcess) -> dict[str, float]:
    """Return the number of pieces sent by transport."""
    sent: dict[str, float] = {}
    for worker in server.workers().values():
        for pair in worker["pairs"]:
            count = pair["counters"].get("kv_transfer_pieces_total", 0.0)
            sent[pair["transport"]] = sent.get(pair["transport"], 0.0) + count
    return sent


def prompts(seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(3, VOCAB_SIZE) for _ in range(length)] for length in LENGTHS]


def test_tokens_equal_generate(server: ServerProcess, reference: PreTrainedModel) -> None:
    before = counter(server, "handoffs_total")
    for prompt in prompts(1):
        assert tokens(server, prompt) == greedy(reference, prompt, 12)
    server.wait(lambda: counter(server, "handoffs_total") >= before + len(LENGTHS), 30)
    server.wait(lambda: pieces_sent(server).get("object_store", 0.0) >= len(LENGTHS), 30)
    assert set(pieces_sent(server)) == {"object_store"}
    used = {name for worker in server.workers().values() for name in worker["transports"].values()}
    assert used == {"object_store"}


def test_the_workers_restart_under_another_ray(server: ServerProcess, reference: PreTrainedModel) -> None:
    """The workers run in processes of Ray, and end with it."""
    old = {worker["pid"] for worker in server.workers().values()}
    server.lose("raylet")
    prompt = prompts(4)[2]
    server.wait(lambda: not old & {worker["pid"] for worker in server.workers().values()}, START_S)
    server.wait(lambda: httpx.get(f"{server.url}/ready", timeout=ANSWER_S).is_success, START_S)
    assert tokens(server, prompt) == greedy(reference, prompt, 12)
