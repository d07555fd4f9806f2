"""Requests through real prefill and decode workers; failed hand-offs go elsewhere or stay."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import PreTrainedModel

from protocol.ids import PeerAddress
from protocol.outputs import RequestTiming, TransferTiming
from tests.worker.harness import Cluster, RunningWorker, request, tiny_config
from tests.worker.tiny_model import greedy, prompt

Pair = tuple[RunningWorker, RunningWorker]


@pytest.fixture
def pair(cluster: Cluster, model_folder: Path) -> Pair:
    return cluster.start_pair(tiny_config(model_folder))


def test_one_message_carries_a_whole_step(cluster: Cluster, pair: Pair) -> None:
    _, decode = pair
    names = [f"r{index}" for index in range(8)]
    for index, name in enumerate(names):
        cluster.generate(decode, request(name, prompt(5, index), max_tokens=30))
    cluster.run(*names)
    assert max(len(step.outputs) for step in cluster.steps) == 8
    assert len(cluster.steps) < 8 * 30 / 2


def test_whole_requests_run_on_either_worker(
    cluster: Cluster, pair: Pair, reference: PreTrainedModel
) -> None:
    for worker in pair:
        cluster.generate(worker, request(worker.worker_id, prompt(40)))
    cluster.run("prefill-0", "decode-0")
    for worker in pair:
        assert cluster.tokens(worker.worker_id) == greedy(reference, prompt(40), 12)
        assert set(cluster.sources(worker.worker_id)) == {worker.worker_id}
        ((_, timing),) = timings(cluster, worker.worker_id)
        assert timing.transfer is None and timing.prefill_s > 0
    cluster.wait_empty(*pair)


def test_cached_blocks_do_not_move(cluster: Cluster, pair: Pair, reference: PreTrainedModel) -> None:
    prefill, decode = pair
    for name in ("first", "again"):
        cluster.serve(prefill, request(name, prompt(96)), decode=decode.address)
        assert cluster.tokens(name) == greedy(reference, prompt(96), 12)
    cluster.wait_empty(prefill, decode)
    assert prefill.counter("handoffs_total") == decode.counter("handoffs_total") == 2
    assert prefill.counter("kv_blocks_pushed_total") == 6
    assert prefill.counter("kv_blocks_skipped_total") == 6
    timing = transfer(cluster, "again")
    assert (timing.transport, timing.transferred_bytes, timing.transfer_s, timing.exposed_s) == ("", 0, 0, 0)
    assert timing.reserve_s > 0 and timing.handoff_s > 0


def test_a_pair_with_different_blocks_is_refused_by_the_flag(
    cluster: Cluster, model_folder: Path, reference: PreTrainedModel
) -> None:
    prefill = cluster.start("prefill", "prefill-0", tiny_config(model_folder))
    decode = cluster.start("decode", "decode-0", tiny_config(model_folder, block_size=32))
    cluster.generate(prefill, request("r", prompt(100)), decode.address)
    failure = cluster.handover_failed("r")
    assert failure.error_kind == "transfer"
    reason = "the sender has 16, here it is 32; start both with the same --block-size"
    assert f"block_size: target: {reason}" in failure.reason
    cluster.redirect(prefill, "r", None)
    cluster.run("r")
    assert cluster.tokens("r") == greedy(reference, prompt(100), 12)
    cluster.wait(lambda: prefill.counter("handoffs_kept_total") == 1)
    assert prefill.counter("handoff_failures_total") == 1
    cluster.wait_empty(prefill, decode)


def test_preempted_prompts_are_pushed_again(
    cluster: Cluster, model_folder: Path, reference: PreTrainedModel
) -> None:
    """The prefill pool is too small for all prompts: pushed chunks are lost and sent again."""
    config = tiny_config(model_folder, max_model_len=256, max_num_batched_tokens=32)
    small = tiny_config(
        model_folder, max_model_len=256, max_num_batched_tokens=32, kv_cache_memory_bytes=17 * 16 * 512
    )
    prefill = cluster.start("prefill", "prefill-0", small)
    decode = cluster.start("decode", "decode-0", config)
    whole = {f"w{index}": prompt(30, 50 + index) for index in range(3)}
    handed = {f"r{index}": prompt(150, index) for index in range(4)}
    for name, tokens in whole.items():
        cluster.generate(prefill, request(name, tokens, max_tokens=60))
    for name, tokens in handed.items():
        cluster.generate(prefill, request(name, tokens), decode.address)
    cluster.run(*whole, *handed)
    for name, tokens in handed.items():
        assert cluster.tokens(name) == greedy(reference, tokens, 12)
    for name, tokens in whole.items():
        assert cluster.tokens(name) == greedy(reference, tokens, 60)
    assert prefill.state.num_preemptions > 0
    cluster.wait_empty(prefill, decode)


SLOW_S = 0.1
CHUNK = 64


def timings(cluster: Cluster, request_id: str) -> list[tuple[str, RequestTiming]]:
    """Return the timing records in order, with the workers that sent them."""
    return [
        (worker, output.timing) for worker, output in cluster.outputs[request_id] if output.timing is not None
    ]


def transfer(cluster: Cluster, request_id: str) -> TransferTiming:
    (_, first), (worker, second) = timings(cluster, request_id)
    assert first.transfer is None and first.prefill_s > 0
    assert worker == "decode-0" and (second.queue_s, second.prefill_s) == (0, 0)
    assert second.transfer is not None
    return second.transfer


def test_a_transfer_behind_slow_chunks(cluster: Cluster, model_folder: Path) -> None:
    config = tiny_config(model_folder, kv_transports="tcp")
    prefill = cluster.start("prefill", "prefill-0", config, f"slow:{SLOW_S}")
    decode = cluster.start("decode", "decode-0", config)
    cluster.generate(prefill, request("first", prompt(3)), decode.address)
    cluster.run("first")  # the first connection is not to be measured
    for index in range(3):
        cluster.serve(prefill, request(f"r{index}", prompt(4 * CHUNK, index + 1)), decode=decode.address)
    # On a busy machine one grant may have been late.
    timing = min((transfer(cluster, f"r{index}") for index in range(3)), key=lambda each: each.reserve_s)
    block_bytes = 4 * 1024 * 1024 // decode.state.total_blocks
    assert (timing.transport, timing.transferred_bytes) == ("tcp", 16 * block_bytes)
    # The delay comes before a step's work: the blocks are granted during the second of four steps.
    assert 2 * SLOW_S <= timing.transfer_s < 10
    assert 0 < timing.exposed_s < timing.transfer_s - 1.5 * SLOW_S
    assert 0 <= timing.wait_s < timing.transfer_s
    assert 0 < timing.reserve_s < 10
    assert 0 <= timing.handoff_s < 5


NOWHERE = PeerAddress(worker_id="decode-x", incarnation="0" * 16, control="tcp://127.0.0.1:9")
NUM_TOKENS = 12


@pytest.fixture
def prefill(cluster: Cluster, model_folder: Path) -> RunningWorker:
    return cluster.start("prefill", "prefill-0", tiny_config(model_folder))


@pytest.fixture
def decode(cluster: Cluster, model_folder: Path) -> RunningWorker:
    return cluster.start("decode", "decode-1", tiny_config(model_folder))


def computed(cluster: Cluster, worker: RunningWorker) -> float:
    cluster.refresh(worker)
    return worker.counter("computed_tokens_total")


@pytest.mark.parametrize("length", [1, 64])
def test_another_decode_worker_gets_the_same_blocks(
    cluster: Cluster, prefill: RunningWorker, decode: RunningWorker, reference: PreTrainedModel, length: int
) -> None:
    cluster.generate(prefill, request("r", prompt(length)), NOWHERE)
    failure = cluster.handover_failed("r")
    assert (failure.error_kind, failure.decode_incarnation) == ("transfer", NOWHERE.incarnation)
    assert not failure.manifest_sent
    cluster.wait(lambda: bool(cluster.outputs["r"]))
    cluster.redirect(prefill, "r", decode.address)
    cluster.run("r")
    assert cluster.tokens("r") == greedy(reference, prompt(length), NUM_TOKENS)
    assert cluster.sources("r") == ["prefill-0"] + ["decode-1"] * (NUM_TOKENS - 1)
    assert computed(cluster, prefill) == length
    assert computed(cluster, decode) == NUM_TOKENS - 1
    cluster.wait_empty(prefill, decode)
    assert prefill.counter("handoffs_redirected_total") == 1
