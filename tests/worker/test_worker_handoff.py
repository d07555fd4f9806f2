"""Requests through a real prefill and a real decode worker."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedModel

from protocol.outputs import RequestTiming, TransferTiming
from protocol.router_to_worker import Generate
from tests.worker.harness import Cluster, RunningWorker, request, tiny_config
from tests.worker.tiny_model import VOCAB_SIZE, greedy

Pair = tuple[RunningWorker, RunningWorker]


def prompt(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed * 1000 + length).choices(range(1, VOCAB_SIZE), k=length)


@pytest.fixture
def pair(cluster: Cluster, model_folder: Path) -> Pair:
    return cluster.start_pair(tiny_config(model_folder))


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_tokens_equal_generate(
    cluster: Cluster, model_folder: Path, reference: PreTrainedModel, transport: str
) -> None:
    prefill, decode = cluster.start_pair(tiny_config(model_folder, kv_transports=transport))
    lengths = [1, 15, 16, 17, 64, 65, 200]
    for length in lengths:
        cluster.generate(prefill, request(f"r{length}", prompt(length)), decode.address)
    cluster.run(*[f"r{length}" for length in lengths])
    for length in lengths:
        assert cluster.tokens(f"r{length}") == greedy(reference, prompt(length), 12)
        assert cluster.sources(f"r{length}") == ["prefill-0"] + ["decode-0"] * 11
    cluster.wait_empty(prefill, decode)
    cluster.wait(lambda: prefill.counter("handoffs_total") == len(lengths))
    cluster.wait(lambda: decode.counter("handoffs_total") == len(lengths))
    cluster.wait(lambda: prefill.state.transports == {"decode-0": transport})


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
        cluster.generate(prefill, request(name, prompt(96)), decode.address)
        cluster.run(name)
        assert cluster.tokens(name) == greedy(reference, prompt(96), 12)
    cluster.wait_empty(prefill, decode)
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


def test_first_token_ends_the_request(cluster: Cluster, pair: Pair) -> None:
    prefill, decode = pair
    cluster.generate(prefill, request("one", prompt(50), max_tokens=1), decode.address)
    cluster.run("one")
    assert len(cluster.tokens("one")) == 1
    cluster.wait(lambda: decode.counter("reservations_released_total") == 1)
    cluster.wait_empty(prefill, decode)
    assert prefill.counter("handoffs_total") == 0


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


def test_aborts_free_everything(cluster: Cluster, pair: Pair) -> None:
    prefill, decode = pair
    chance = random.Random(5)
    names = [f"r{index}" for index in range(60)]
    for index, name in enumerate(names):
        worker, peer = (prefill, decode.address) if index % 3 else (decode, None)
        cluster.generate(worker, request(name, prompt(30 + index * 3, index), max_tokens=40), peer)
        if chance.random() < 0.7:
            victim = names[chance.randrange(index + 1)]
            cluster.abort(victim)
        if chance.random() < 0.3:
            seen = len(cluster.steps)
            cluster.wait(lambda seen=seen: len(cluster.steps) > seen)  # type: ignore[misc]
    cluster.abort(*names)
    cluster.wait_empty(prefill, decode)
    cluster.generate(prefill, request("after", prompt(33)), decode.address)
    cluster.run("after")
    cluster.wait_empty(prefill, decode)


def test_refused_requests_say_why(cluster: Cluster, pair: Pair) -> None:
    prefill, decode = pair
    cluster.generate(prefill, request("long", prompt(1020), max_tokens=50), decode.address)
    stale = Generate(incarnation="0" * 16, request=request("stale", prompt(5)))
    cluster.send("decode-0", stale)
    cluster.run("long", "stale")
    assert cluster.error("long").error_kind == "invalid"
    assert "max_tokens" in (cluster.error("long").error or "")
    assert cluster.error("stale").error_kind == "worker_lost"


def test_garbage_is_counted_and_dropped(cluster: Cluster, pair: Pair) -> None:
    _, decode = pair
    cluster._socket.send_multipart([b"decode-0", b"\xc1 not msgpack"])
    cluster.wait(lambda: decode.counter("dropped_messages_total") == 1)
    cluster.generate(decode, request("fine", prompt(5)))
    cluster.run("fine")
    assert len(cluster.tokens("fine")) == 12


def test_heartbeats_have_a_pairs_moved_bytes(cluster: Cluster, model_folder: Path) -> None:
    prefill, decode = cluster.start_pair(tiny_config(model_folder, kv_transports="tcp"))
    for name, length in (("first", 200), ("second", 100)):
        cluster.generate(prefill, request(name, prompt(length)), decode.address)
    cluster.run("first", "second")
    cluster.wait(lambda: prefill.counter("handoffs_total") == 2)
    moved = (13 + 7) * 4 * 1024 * 1024 // decode.state.total_blocks
    cluster.wait(
        lambda: [pair.counters.get("kv_transfer_bytes_total") for pair in prefill.state.pairs] == [moved]
    )
    cluster.refresh(prefill, decode)
    (sent,), (received,) = prefill.state.pairs, decode.state.pairs
    assert (sent.peer, sent.transport, sent.in_use) == ("decode-0", "tcp", True)
    assert (received.peer, received.transport, received.in_use) == ("prefill-0", "tcp", False)
    assert sent.counters["kv_transfer_bytes_total"] == received.counters["kv_receive_bytes_total"] == moved
    assert sent.counters["kv_transfers_total"] == 2
    assert 0 < sent.counters["kv_transfer_wire_seconds_total"] < 10


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


def hand_over(
    cluster: Cluster, prefill: RunningWorker, decode: RunningWorker, name: str, length: int, **params: Any
) -> None:
    cluster.generate(prefill, request(name, prompt(length), **params), decode.address)
    cluster.run(name)


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_transfer_behind_slow_chunks(cluster: Cluster, model_folder: Path, transport: str) -> None:
    config = tiny_config(model_folder, kv_transports=transport)
    prefill = cluster.start("prefill", "prefill-0", config, f"slow:{SLOW_S}")
    decode = cluster.start("decode", "decode-0", config)
    hand_over(cluster, prefill, decode, "first", 3)  # the first connection is not to be measured
    for index in range(3):
        cluster.generate(prefill, request(f"r{index}", prompt(4 * CHUNK, index + 1)), decode.address)
        cluster.run(f"r{index}")
    # On a busy machine one grant may have been late.
    timing = min((transfer(cluster, f"r{index}") for index in range(3)), key=lambda each: each.reserve_s)
    block_bytes = 4 * 1024 * 1024 // decode.state.total_blocks
    assert (timing.transport, timing.transferred_bytes) == (transport, 16 * block_bytes)
    # The delay comes before a step's work: the blocks are granted during the second of four steps.
    assert 2 * SLOW_S <= timing.transfer_s < 10
    assert 0 < timing.exposed_s < timing.transfer_s - 1.5 * SLOW_S
    assert 0 <= timing.wait_s < timing.transfer_s
    assert 0 < timing.reserve_s < 10
    assert 0 <= timing.handoff_s < 5


def test_waiting_for_room_counts_as_reserving(cluster: Cluster, model_folder: Path) -> None:
    config = tiny_config(model_folder, max_model_len=128)
    small = tiny_config(model_folder, max_model_len=128, kv_cache_memory_bytes=24 * 16 * 512)
    prefill = cluster.start("prefill", "prefill-0", config)
    decode = cluster.start("decode", "decode-0", small, f"slow:{SLOW_S / 2}")
    for index in range(3):  # eight of 24 blocks each, for 25 slow steps
        cluster.generate(decode, request(f"local{index}", prompt(100, index), max_tokens=25))
    cluster.wait(lambda: all(cluster.outputs[f"local{index}"] for index in range(3)))
    cluster.generate(prefill, request("r", prompt(90, 9)), decode.address)
    cluster.run("r")
    assert transfer(cluster, "r").reserve_s > 3 * SLOW_S


def test_a_busy_decode_worker_shows_in_the_handoff(cluster: Cluster, model_folder: Path) -> None:
    config = tiny_config(model_folder)
    prefill = cluster.start("prefill", "prefill-0", config)
    decode = cluster.start("decode", "decode-0", config, f"slow:{2 * SLOW_S}")
    cluster.generate(decode, request("local", prompt(20, 1), max_tokens=12))
    cluster.wait(lambda: bool(cluster.outputs["local"]))
    for index in range(3):
        hand_over(cluster, prefill, decode, f"r{index}", 40 + index, max_tokens=2)
    timing = [transfer(cluster, f"r{index}") for index in range(3)]
    # Blocks arrive during a step and wait for the next one. So does the reservation.
    assert all(0 <= each.handoff_s < 10 for each in timing)
    assert max(each.reserve_s + each.handoff_s for each in timing) > SLOW_S
