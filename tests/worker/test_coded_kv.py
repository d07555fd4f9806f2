"""Workers with KV quantized to one byte per value: it moves unchanged, and different formats are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from protocol.config import ServeConfig
from protocol.requests import EngineRequest
from tests.worker.harness import Cluster, RunningWorker, request, tiny_config
from tests.worker.test_worker_handoff import prompt

LENGTHS = [15, 64, 200]


def coded_config(model: Path, kv_cache_dtype: str = "int8", **changes: Any) -> ServeConfig:
    """Return a bfloat16 configuration, in which a row's products have the same bits in every batch."""
    return tiny_config(model, dtype="bfloat16", compile="auto", kv_cache_dtype=kv_cache_dtype, **changes)


def asked(name: str, length: int) -> EngineRequest:
    return request(name, prompt(length), max_tokens=24, temperature=1.0, seed=length)


def whole(cluster: Cluster, worker: RunningWorker) -> list[list[int]]:
    """Return the prompts' answers by this worker alone."""
    for length in LENGTHS:
        cluster.generate(worker, asked(f"whole{length}", length))
    cluster.run(*[f"whole{length}" for length in LENGTHS])
    return [cluster.tokens(f"whole{length}") for length in LENGTHS]


@pytest.mark.parametrize(("kv_cache_dtype", "transport"), [("int8", "shm"), ("fp8", "tcp")])
def test_split_gives_the_tokens_of_one_worker(
    cluster: Cluster, model_folder: Path, kv_cache_dtype: str, transport: str
) -> None:
    config = coded_config(model_folder, kv_cache_dtype, kv_transports=transport)
    prefill = cluster.start("prefill", "prefill-0", config)
    decode = cluster.start("decode", "decode-0", config)
    for length in LENGTHS:
        cluster.generate(prefill, asked(f"split{length}", length), decode.address)
    cluster.run(*[f"split{length}" for length in LENGTHS])
    split = [cluster.tokens(f"split{length}") for length in LENGTHS]
    assert set(cluster.sources("split200")[1:]) == {"decode-0"}
    assert whole(cluster, decode) == split
    for length in LENGTHS[1:]:  # the moved blocks equal computed ones
        assert cluster.outputs[f"whole{length}"][0][1].cached_tokens == min(length // 16 * 16, length - 1)
    cluster.wait_empty(prefill, decode)


@pytest.mark.parametrize(("theirs", "ours"), [("int8", "auto"), ("auto", "fp8"), ("fp8", "int8")])
def test_different_formats_are_refused_by_the_flag(
    cluster: Cluster, model_folder: Path, theirs: str, ours: str
) -> None:
    prefill = cluster.start("prefill", "prefill-0", coded_config(model_folder, theirs))
    decode = cluster.start("decode", "decode-0", coded_config(model_folder, ours))
    cluster.generate(prefill, asked("r", 64), decode.address)
    failure = cluster.handover_failed("r")
    assert failure.error_kind == "transfer"
    assert f"the sender has --kv-cache-dtype {theirs}, here it is {ours}" in failure.reason
    cluster.redirect(prefill, "r", None)
    cluster.run("r")
    assert set(cluster.sources("r")) == {"prefill-0"}
    cluster.wait_empty(prefill, decode)


@pytest.mark.parametrize("theirs", ["int8", "auto"])
def test_a_prefix_is_fetched_only_from_a_pool_of_the_same_format(
    cluster: Cluster, model_folder: Path, theirs: str
) -> None:
    holder = cluster.start("prefill", "prefill-1", coded_config(model_folder, theirs))
    asking = cluster.start("decode", "decode-0", coded_config(model_folder))
    cluster.generate(holder, asked("before", 200))
    cluster.run("before")
    cluster.generate(asking, asked("r", 200), prefix=holder.address)
    cluster.run("r")
    cached = cluster.outputs["r"][0][1].cached_tokens
    cluster.generate(asking, asked("again", 200))
    cluster.run("again")
    assert cluster.tokens("r") == cluster.tokens("again")
    assert (cluster.tokens("r") == cluster.tokens("before")) == (theirs == "int8")
    assert cached == (192 if theirs == "int8" else 0)
    cluster.wait_empty(holder, asking)
