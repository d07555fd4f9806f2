"""A real prefill worker with the test as decode worker."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from kvtransfer.blocks.memory import PoolMemory
from kvtransfer.interface import Progress, RegisteredPool
from protocol.handoff import SegmentInfo
from protocol.worker_to_worker import Handoff, HandoffAck, Reserve
from tests.worker.harness import Cluster, RunningWorker, request, tiny_config
from tests.worker.peer_ends import DecodeEnd, closing
from tests.worker.tiny_model import VOCAB_SIZE

BLOCK_BYTES = 2 * 2 * 16 * 2 * 16 * 4
HANDOFF_TIMEOUT_S = 1.5


def prompt(length: int) -> list[int]:
    return random.Random(length).choices(range(1, VOCAB_SIZE), k=length)


@pytest.fixture
def prefill(cluster: Cluster, model_folder: Path) -> RunningWorker:
    return cluster.start("prefill", "prefill-0", tiny_config(model_folder, handoff_timeout=HANDOFF_TIMEOUT_S))


@pytest.fixture
def peer(cluster: Cluster) -> Iterator[DecodeEnd]:
    memory = PoolMemory(100 * BLOCK_BYTES)
    pool = RegisteredPool(
        buffer=memory.buffer,
        block_bytes=BLOCK_BYTES,
        num_blocks=100,
        segments=(SegmentInfo(name="target", dtype="float32", shape=(2, 2, 16, 2, 16)),),
        memory_fd=memory.fd,
    )
    yield from closing(DecodeEnd(cluster, pool))


def start(
    cluster: Cluster, prefill: RunningWorker, peer: DecodeEnd, name: str = "r", length: int = 50, **more: Any
) -> Any:
    req = request(name, prompt(length), **more)
    cluster.generate(prefill, req, peer.address)
    return req


def test_the_first_token_waits_for_no_transfer(
    cluster: Cluster, prefill: RunningWorker, peer: DecodeEnd
) -> None:
    req = start(cluster, prefill, peer)
    cluster.wait(lambda: len(cluster.outputs["r"]) == 1)
    reserve = peer.receive(Reserve)
    peer.reply(peer.grant(reserve.request))
    manifest = peer.receive(Handoff).manifest
    assert manifest.first_token == cluster.outputs["r"][0][1].token_ids[0]
    assert manifest.num_tokens == len(req.prompt_token_ids)
    cluster.refresh(prefill)
    assert prefill.used_blocks == 4
    peer.reply(HandoffAck(request_id="r", lease_id="lease"))
    cluster.wait_empty(prefill)
    assert len(cluster.outputs["r"]) == 1
    assert not cluster.finished("r")


def test_chunks_are_pushed_while_the_next_one_is_computed(
    cluster: Cluster, model_folder: Path, peer: DecodeEnd
) -> None:
    prefill = cluster.start("prefill", "prefill-0", tiny_config(model_folder), fault="slow:0.05")
    start(cluster, prefill, peer, length=640)
    peer.reply(peer.grant(peer.receive(Reserve).request))
    seen: list[int] = []

    def first_token() -> bool:
        seen.extend(event.blocks_received for event in peer.receiver.poll() if isinstance(event, Progress))
        return bool(cluster.outputs["r"])

    cluster.wait(first_token)
    assert len(seen) > 4 and seen[-1] >= 30
    assert seen == sorted(seen)
    peer.receive(Handoff)


def test_nothing_is_reserved_before_the_prompt_is_scheduled(
    cluster: Cluster, model_folder: Path, peer: DecodeEnd
) -> None:
    config = tiny_config(model_folder, max_num_seqs=1)
    prefill = cluster.start("prefill", "prefill-0", config, fault="slow:0.01")
    cluster.generate(prefill, request("busy", prompt(10), max_tokens=60))
    cluster.wait(lambda: len(cluster.outputs["busy"]) > 2)
    start(cluster, prefill, peer)
    assert peer.silent(0.2)
    cluster.run("busy")
    assert peer.receive(Reserve).request.request_id == "r"


def test_a_long_prompt_renews_its_lease(cluster: Cluster, model_folder: Path, peer: DecodeEnd) -> None:
    """The worker's own time-out must not expire while the engine computes."""
    config = tiny_config(model_folder, handoff_timeout=0.8)
    prefill = cluster.start("prefill", "prefill-0", config, fault="slow:0.2")
    start(cluster, prefill, peer, length=900)
    grant = peer.grant(peer.receive(Reserve).request)
    peer.reply(grant)
    renewals = 0
    while True:
        message = peer.receive(object)
        if isinstance(message, Handoff):
            break
        assert isinstance(message, Reserve), message
        renewals += 1
        peer.reply(grant)
    assert renewals >= 3
    peer.reply(HandoffAck(request_id="r", lease_id="lease"))
    cluster.wait_empty(prefill)
    assert not cluster.finished("r")


def test_waiting_for_room_uses_no_cpu(cluster: Cluster, model_folder: Path, peer: DecodeEnd) -> None:
    config = tiny_config(model_folder, max_model_len=640, kv_cache_memory_bytes=60 * BLOCK_BYTES)
    prefill = cluster.start("prefill", "prefill-0", config)
    start(cluster, prefill, peer, name="held", length=600)
    peer.reply(peer.grant(peer.receive(Reserve).request))
    peer.receive(Handoff)
    start(cluster, prefill, peer, name="waiting", length=500)
    cluster.wait(lambda: prefill.state.num_waiting == 1)
    process = psutil.Process(prefill.process.pid)
    before = sum(process.cpu_times()[:2])
    started = time.monotonic()
    cluster.refresh(prefill)
    assert sum(process.cpu_times()[:2]) - before < 0.3 * (time.monotonic() - started)
    peer.reply(HandoffAck(request_id="held", lease_id="lease"))
    cluster.wait(lambda: bool(cluster.outputs["waiting"]))
