"""A worker fetches prefix blocks from another one's pool, with real workers."""

from __future__ import annotations

import random
import signal
from pathlib import Path

import msgspec
import pytest
from transformers import PreTrainedModel

from tests.worker.harness import Cluster, RunningWorker, request, tiny_config
from tests.worker.tiny_model import VOCAB_SIZE, greedy

BLOCK_SIZE = 16
PATIENT = "fetch:25"
"""The worker waits this many seconds for the next block, however busy the machine is."""


def prompt(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed * 1000 + length).choices(range(1, VOCAB_SIZE), k=length)


@pytest.fixture
def holder(cluster: Cluster, model_folder: Path) -> RunningWorker:
    """Start a prefill worker that has computed a prompt of 200 tokens."""
    worker = cluster.start("prefill", "prefill-1", tiny_config(model_folder))
    cluster.generate(worker, request("before", prompt(200), max_tokens=1))
    cluster.run("before")
    return worker


@pytest.fixture
def asking(cluster: Cluster, model_folder: Path) -> RunningWorker:
    return cluster.start("prefill", "prefill-0", tiny_config(model_folder))


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_only_missing_blocks_are_computed(
    cluster: Cluster, model_folder: Path, reference: PreTrainedModel, transport: str
) -> None:
    config = tiny_config(model_folder, kv_transports=transport)
    holder = cluster.start("prefill", "prefill-1", config)
    decode = cluster.start("decode", "decode-0", config)
    asking = cluster.start("prefill", "prefill-0", config, PATIENT)
    cluster.generate(holder, request("before", prompt(200), max_tokens=1))
    cluster.run("before")
    longer = prompt(200) + prompt(50, seed=7)
    cluster.generate(asking, request("r", longer), decode.address, prefix=holder.address)
    cluster.run("r")
    assert cluster.tokens("r") == greedy(reference, longer, 12)
    assert cluster.outputs["r"][0][1].cached_tokens == 192
    cluster.wait_empty(holder, asking, decode)
    assert asking.counter("prefix_blocks_fetched_total") == 192 // BLOCK_SIZE
    assert holder.counter("prefix_blocks_lent_total") == 192 // BLOCK_SIZE
    assert asking.counter("computed_tokens_total") == len(longer) - 192


def test_a_conversation_is_fetched_from_its_decode_worker(
    cluster: Cluster, model_folder: Path, reference: PreTrainedModel
) -> None:
    prefill, decode = cluster.start_pair(tiny_config(model_folder))
    fresh = cluster.start("prefill", "prefill-1", tiny_config(model_folder), PATIENT)
    cluster.generate(prefill, request("turn 1", prompt(70), max_tokens=60), decode.address)
    cluster.run("turn 1")
    conversation = prompt(70) + cluster.tokens("turn 1")
    second = conversation + prompt(30, seed=3)
    cluster.generate(fresh, request("turn 2", second), decode.address, prefix=decode.address)
    cluster.run("turn 2")
    assert cluster.tokens("turn 2") == greedy(reference, second, 12)
    cluster.wait_empty(prefill, decode, fresh)
    held = (len(conversation) - 1) // BLOCK_SIZE
    assert fresh.counter("prefix_blocks_fetched_total") == held
    assert fresh.counter("kv_blocks_skipped_total") == held, "the decode worker has them still"
    cluster.wait(lambda: decode.state.transports == {"prefill-1": "shm"})


def test_a_decode_worker_fetches_too(
    cluster: Cluster, model_folder: Path, holder: RunningWorker, reference: PreTrainedModel
) -> None:
    decode = cluster.start("decode", "decode-0", tiny_config(model_folder), PATIENT)
    cluster.generate(decode, request("r", prompt(200)), prefix=holder.address)
    cluster.run("r")
    assert cluster.tokens("r") == greedy(reference, prompt(200), 12)
    cluster.wait_empty(holder, decode)
    assert decode.counter("prefix_blocks_fetched_total") == 12


def test_local_blocks_are_not_fetched(
    cluster: Cluster, model_folder: Path, holder: RunningWorker, reference: PreTrainedModel
) -> None:
    asking = cluster.start("prefill", "prefill-0", tiny_config(model_folder), PATIENT)
    cluster.generate(asking, request("half", prompt(200)[:100], max_tokens=1))
    cluster.run("half")
    cluster.generate(asking, request("r", prompt(200)), prefix=holder.address)
    cluster.run("r")
    cluster.generate(asking, request("again", prompt(200)), prefix=holder.address)
    cluster.run("again")
    for name in ("r", "again"):
        assert cluster.tokens(name) == greedy(reference, prompt(200), 12)
    cluster.wait_empty(holder, asking)
    assert asking.counter("prefix_blocks_fetched_total") == 12 - 6
    assert asking.counter("prefix_fetches_total") == 1


@pytest.mark.parametrize("salt", ["", "tenant"])
def test_a_holder_without_the_prefix_says_so(
    cluster: Cluster, holder: RunningWorker, asking: RunningWorker, reference: PreTrainedModel, salt: str
) -> None:
    """It never had the prompt, or has it without this tenant's cache salt."""
    tokens = prompt(200) if salt else prompt(180, seed=5)
    wanted = msgspec.structs.replace(request("r", tokens), cache_salt=salt)
    cluster.generate(asking, wanted, prefix=holder.address)
    cluster.run("r")
    assert cluster.tokens("r") == greedy(reference, tokens, 12)
    cluster.wait_empty(holder, asking)
    assert asking.counter("prefix_blocks_fetched_total") == 0
    assert asking.counter("prefix_fetch_failures_total") == 0


def test_quantized_blocks_are_not_lent(
    cluster: Cluster, model_folder: Path, reference: PreTrainedModel
) -> None:
    """A fetched prefix must equal a computed one bit by bit."""
    config = tiny_config(model_folder, kv_transports="tcp", kv_wire_dtype="int8")
    holder = cluster.start("prefill", "prefill-1", config)
    asking = cluster.start("prefill", "prefill-0", config)
    cluster.generate(holder, request("before", prompt(200), max_tokens=1))
    cluster.run("before")
    cluster.generate(asking, request("r", prompt(200)), prefix=holder.address)
    cluster.run("r")
    assert cluster.tokens("r") == greedy(reference, prompt(200), 12)
    cluster.wait_empty(holder, asking)
    assert asking.counter("prefix_fetch_failures_total") == 1
    assert holder.counter("prefix_blocks_lent_total") == 0


def test_a_frozen_holder_that_wakes_up_late_changes_nothing(
    cluster: Cluster, holder: RunningWorker, asking: RunningWorker, reference: PreTrainedModel
) -> None:
    holder.signal(signal.SIGSTOP)
    try:
        cluster.generate(asking, request("r", prompt(200)), prefix=holder.address)
        cluster.run("r", timeout_s=10)
    finally:
        holder.signal(signal.SIGCONT)
    assert cluster.tokens("r") == greedy(reference, prompt(200), 12)
    cluster.wait(lambda: holder.state.counters.get("kv_leases_failed_total") == 1)
    cluster.wait_empty(holder, asking)
    cluster.generate(asking, request("next", prompt(200)[:150] + prompt(40, seed=9)))
    cluster.run("next")
    assert cluster.tokens("next") == greedy(reference, prompt(200)[:150] + prompt(40, seed=9), 12)


def test_without_room_the_prompt_waits_like_any_other(
    cluster: Cluster, model_folder: Path, holder: RunningWorker, reference: PreTrainedModel
) -> None:
    """A long answer holds most of the pool. The prompt is computed when there is room."""
    small = tiny_config(model_folder, kv_cache_memory_bytes=21 * BLOCK_SIZE * 512, max_model_len=320)
    asking = cluster.start("prefill", "prefill-0", small)
    cluster.generate(asking, request("long", prompt(20, seed=1), max_tokens=150))
    cluster.wait(lambda: bool(cluster.outputs["long"]))
    cluster.generate(asking, request("r", prompt(200)), prefix=holder.address)
    cluster.run("long", "r")
    assert cluster.tokens("r") == greedy(reference, prompt(200), 12)
    cluster.wait_empty(holder, asking)
