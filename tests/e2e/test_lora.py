"""Adapters over HTTP: hand-offs, deaths, drafts and unloading change no token. fp32."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from protocol.speculation import parse_speculative_config
from tests.e2e.architectures import prompt
from tests.e2e.serving import HttpServing
from tests.engine.adapter_files import merge, write_adapter
from tests.worker.tiny_model import greedy, load

NAMES = ("one", "other")
NUM_TOKENS = 24
OPTIONS: dict[str, Any] = {"compile": "off"}
"""The native decoder adds no adapters in fp32, and compiling takes longer than all the rest."""
KILLED = {"prefill-0": "slow:0.02", "decode-0": "KILL:after:after_step:7", "decode-1": ""}
REQUESTS = [(name, length) for length in (70, 33) for name in ("model", *NAMES)]


@pytest.fixture(scope="module")
def modules(folder: Path) -> dict[str, str]:
    return {name: str(write_adapter(folder, folder / name, seed)) for seed, name in enumerate(NAMES)}


@pytest.fixture(scope="module")
def expected(folder: Path, modules: dict[str, str]) -> list[list[int]]:
    """Return the tokens of Transformers with each adapter merged into the weights."""
    models = {name: merge(load(folder), Path(path), lambda _: 2.0) for name, path in modules.items()}
    models["model"] = load(folder)
    return [greedy(models[name], prompt(length), NUM_TOKENS) for name, length in REQUESTS]


def ask(serving: HttpServing, name: str, length: int) -> list[int]:
    return serving.tokens(prompt(length), NUM_TOKENS, model=name)


def ask_all(serving: HttpServing) -> list[list[int]]:
    with ThreadPoolExecutor(len(REQUESTS)) as pool:
        return list(pool.map(lambda request: ask(serving, *request), REQUESTS))


def load_adapter(serving: HttpServing, name: str, path: str) -> Any:
    return serving.http.post("/v1/load_lora_adapter", json={"lora_name": name, "lora_path": path})


def test_tokens_equal_those_of_merged_weights(
    folder: Path, modules: dict[str, str], expected: list[list[int]]
) -> None:
    """Split, with drafts, and after a decode worker's death."""
    drafts = parse_speculative_config({"method": "ngram", "num_speculative_tokens": 3})
    options = OPTIONS | {"lora_modules": modules, "speculative_config": drafts}
    with HttpServing(folder, KILLED, **options) as serving:
        assert ask_all(serving) == expected
        assert serving.metric("tandem_requests_placed_again_total") > 0
        serving.wait_empty()
        assert ask_all(serving) == expected  # again, with the prefix caches filled
        serving.wait_empty()
        assert serving.metric("tandem_request_failures_total") == 0


def test_adapters_come_and_go_while_the_server_runs(
    folder: Path, modules: dict[str, str], expected: list[list[int]]
) -> None:
    workers = {"prefill-0": "", "decode-0": "slow:0.02"}
    with HttpServing(folder, workers, enable_lora=True, **OPTIONS) as serving:
        answer = load_adapter(serving, "one", str(folder / "nothing"))
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "lora_path")
        assert "adapter_config.json: cannot be read" in answer.text
        (folder / "pipe").mkdir()
        # every worker once waited for a pipe like this one
        os.mkfifo(folder / "pipe" / "adapter_config.json")
        answer = load_adapter(serving, "one", str(folder / "pipe"))
        assert (answer.status_code, "is not a regular file" in answer.text) == (400, True)
        assert load_adapter(serving, "one", modules["one"]).status_code == 200
        serving.add("decode-1")  # a worker that joins later has the adapter too
        assert load_adapter(serving, "other", modules["other"]).status_code == 200
        with ThreadPoolExecutor() as pool:
            asked = [pool.submit(ask, serving, *request) for request in REQUESTS]
            serving.wait(lambda: serving.metric("tandem_placements_total") >= len(REQUESTS))
            answer = serving.http.post("/v1/unload_lora_adapter", json={"lora_name": "one"})
            assert answer.status_code == 200
            assert [each.result() for each in asked] == expected
        gone = serving.http.post("/v1/completions", json={"model": "one", "prompt": "x"})
        assert gone.status_code == 404
        assert ask(serving, "other", 33) == expected[REQUESTS.index(("other", 33))]
        assert load_adapter(serving, "one", modules["other"]).status_code == 200  # the name is free again
        assert ask(serving, "one", 33) == expected[REQUESTS.index(("other", 33))]
        serving.wait_empty()
        assert serving.metric("tandem_request_failures_total") == 0
