"""What a request's timing record says of its way from the prefill worker to the decode worker."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from protocol.outputs import RequestTiming, TransferTiming
from tests.worker.harness import Cluster, RunningWorker, request, tiny_config
from tests.worker.test_worker_handoff import prompt

SLOW_S = 0.1
CHUNK = 64


def timings(cluster: Cluster, request_id: str) -> list[tuple[str, RequestTiming]]:
    """The records in their order, with the workers that sent them."""
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
    hand_over(cluster, prefill, decode, "first", 3)  # the wire's first contact is not what is measured
    for index in range(3):
        cluster.generate(prefill, request(f"r{index}", prompt(4 * CHUNK, index + 1)), decode.address)
        cluster.run(f"r{index}")
    # The grant of one may have had to wait for the machine.
    timing = min((transfer(cluster, f"r{index}") for index in range(3)), key=lambda each: each.reserve_s)
    block_bytes = 4 * 1024 * 1024 // decode.state.total_blocks
    assert (timing.transport, timing.transferred_bytes) == (transport, 16 * block_bytes)
    # Slow is what comes before a step's work: the blocks are granted during the second of four steps.
    assert 2 * SLOW_S <= timing.transfer_s < 10
    assert 0 < timing.exposed_s < timing.transfer_s - 1.5 * SLOW_S
    assert 0 <= timing.wait_s < timing.transfer_s
    assert 0 < timing.reserve_s < 10
    assert 0 <= timing.handoff_s < 5


def test_nothing_moves_when_all_is_cached(cluster: Cluster, model_folder: Path) -> None:
    prefill, decode = cluster.start_pair(tiny_config(model_folder))
    hand_over(cluster, prefill, decode, "first", 96)
    hand_over(cluster, prefill, decode, "again", 96)
    timing = transfer(cluster, "again")
    assert (timing.transport, timing.transferred_bytes, timing.transfer_s, timing.exposed_s) == ("", 0, 0, 0)
    assert timing.reserve_s > 0 and timing.handoff_s > 0


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
    # Blocks arrive in the middle of a step and wait for the next one. Reserving waits in the same way.
    assert all(0 <= each.handoff_s < 10 for each in timing)
    assert max(each.reserve_s + each.handoff_s for each in timing) > SLOW_S


def test_a_request_that_stays_on_one_worker_has_no_transfer(cluster: Cluster, model_folder: Path) -> None:
    decode = cluster.start("decode", "decode-0", tiny_config(model_folder))
    cluster.generate(decode, request("r", prompt(30)))
    cluster.run("r")
    ((_, timing),) = timings(cluster, "r")
    assert timing.transfer is None and timing.prefill_s > 0
