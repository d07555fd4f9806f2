"""KV of another format: quantized pools, and KV that a transfer changed, which never counts as computed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedModel

from kvtransfer.transports.registry import TransportOptions
from protocol.config import ServeConfig
from protocol.requests import EngineRequest
from tests.worker.harness import Cluster, RunningWorker, request, tiny_config
from tests.worker.peer_ends import PrefillEnd, closing
from tests.worker.tiny_model import greedy, prompt
from worker.setup import build_engine

CHANGING = {
    "int8 on the wire": ({"kv_transports": "tcp", "kv_wire_dtype": "int8"}, {}),
    "fp8 on the wire": ({"kv_transports": "tcp", "kv_wire_dtype": "fp8"}, {}),
    "computed in another dtype": ({}, {"dtype": "bfloat16"}),
}
BLOCKS = 6
LENGTH = 16 * BLOCKS


def whole(cluster: Cluster, worker: RunningWorker, name: str) -> int | None:
    """Run the prompt on one worker. Return how many of its tokens were cached."""
    cluster.serve(worker, request(name, prompt(LENGTH)))
    return cluster.outputs[name][0][1].cached_tokens


@pytest.mark.parametrize("case", CHANGING)
def test_a_whole_request_never_uses_changed_blocks(
    cluster: Cluster, model_folder: Path, reference: PreTrainedModel, case: str
) -> None:
    options, of_prefill = CHANGING[case]
    prefill = cluster.start("prefill", "prefill-0", tiny_config(model_folder, **options, **of_prefill))
    decode = cluster.start("decode", "decode-0", tiny_config(model_folder, **options))
    for name in ("first", "again"):
        cluster.serve(prefill, request(name, prompt(LENGTH)), decode=decode.address)
    assert whole(cluster, decode, "alone") == 0
    assert cluster.tokens("alone") == greedy(reference, prompt(LENGTH), 12)
    cluster.wait_empty(prefill, decode)
    assert prefill.counter("kv_blocks_pushed_total") == BLOCKS
    assert prefill.counter("kv_blocks_skipped_total") == BLOCKS  # requests over the same transport share them


def test_unexpectedly_quantized_blocks_are_not_kept(cluster: Cluster, model_folder: Path) -> None:
    """This happens when the expected transport breaks and the next one quantizes."""
    decode = cluster.start("decode", "decode-0", tiny_config(model_folder, kv_transports="tcp"))
    engine, pool = build_engine(tiny_config(model_folder))
    options = TransportOptions(wire_dtype="int8")
    for peer in closing(
        PrefillEnd(cluster, decode.address, engine, pool, transports=["tcp"], wire_options=options)
    ):
        asked = request("r", prompt(LENGTH))
        grant = peer.reserve(asked)
        blocks, first_token = peer.prefill(asked)
        peer.push(grant, blocks)
        peer.hand_off(asked, grant, first_token)
        cluster.run("r")
    assert whole(cluster, decode, "alone") == 0


LENGTHS = [15, 64, 200]


def coded_config(model: Path, kv_cache_dtype: str = "int8", **changes: Any) -> ServeConfig:
    """Return a bfloat16 configuration, in which a row's products have the same bits in every batch."""
    return tiny_config(model, dtype="bfloat16", compile="auto", kv_cache_dtype=kv_cache_dtype, **changes)


def asked(name: str, length: int) -> EngineRequest:
    return request(name, prompt(length), max_tokens=24, temperature=1.0, seed=length)


def answers(cluster: Cluster, worker: RunningWorker) -> list[list[int]]:
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
    assert answers(cluster, decode) == split
    for length in LENGTHS[1:]:  # the moved blocks equal computed ones
        assert cluster.outputs[f"whole{length}"][0][1].cached_tokens == min(length // 16 * 16, length - 1)
    cluster.wait_empty(prefill, decode)


@pytest.mark.parametrize("theirs", ["int8", "auto"])
def test_a_prefix_is_fetched_only_from_a_pool_of_the_same_format(
    cluster: Cluster, model_folder: Path, theirs: str
) -> None:
    holder = cluster.start("prefill", "prefill-1", coded_config(model_folder, theirs))
    asking = cluster.start("decode", "decode-0", coded_config(model_folder))
    cluster.serve(holder, asked("before", 200))
    cluster.serve(asking, asked("r", 200), prefix=holder.address)
    cached = cluster.outputs["r"][0][1].cached_tokens
    cluster.serve(asking, asked("again", 200))
    assert cluster.tokens("r") == cluster.tokens("again")
    assert (cluster.tokens("r") == cluster.tokens("before")) == (theirs == "int8")
    assert cached == (192 if theirs == "int8" else 0)
    cluster.wait_empty(holder, asking)
