"""A real worker with the test as its peer; failures that users of other servers reported."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from transformers import PreTrainedModel

from engine.engine import Engine
from kvtransfer.blocks.memory import PoolMemory
from kvtransfer.interface import RegisteredPool
from protocol.handoff import SegmentInfo
from protocol.worker_to_worker import Handoff, HandoffAck, Reserve
from tests.worker.harness import Cluster, RunningWorker, request, tiny_config
from tests.worker.peer_ends import DecodeEnd, closing
from tests.worker.tiny_model import greedy, prompt
from worker.setup import build_engine

BLOCK_BYTES = 16 * 512
ROOM = 24


@pytest.fixture(scope="module")
def source(model_folder: Path) -> tuple[Engine, RegisteredPool]:
    return build_engine(tiny_config(model_folder))


def test_nearly_full_pools_on_both_sides_bring_all_through(
    cluster: Cluster, model_folder: Path, reference: PreTrainedModel
) -> None:
    """A prompt gets room for all of itself or waits, so no two can wait for each other's blocks."""
    small = tiny_config(
        model_folder, max_model_len=128, handoff_timeout=25.0, kv_cache_memory_bytes=ROOM * BLOCK_BYTES
    )
    prefill, decode = cluster.start_pair(small)
    prompts = {f"r{index}": prompt(60 + 3 * index, index) for index in range(16)}
    for name, tokens in prompts.items():
        cluster.generate(prefill, request(name, tokens), decode.address)
    cluster.run(*prompts)
    for name, tokens in prompts.items():
        assert cluster.tokens(name) == greedy(reference, tokens, 12)
    cluster.wait_empty(prefill, decode)
    assert decode.counter("reservations_refused_total") == 0


def test_a_worker_ends_although_its_blocks_wait_for_a_peer(
    cluster: Cluster, model_folder: Path, source: tuple[Engine, RegisteredPool]
) -> None:
    prefill = cluster.start("prefill", "prefill-0", tiny_config(model_folder, handoff_timeout=300.0))
    for peer in closing(DecodeEnd(cluster, source[1])):
        cluster.generate(prefill, request("r", prompt(50)), peer.address)
        peer.reply(peer.grant(peer.receive(Reserve).request))
        peer.receive(Handoff)  # which nobody will ever acknowledge
        asked = time.monotonic()
        assert prefill.ended_when_told() == ""
        assert time.monotonic() - asked < 30


def test_a_pair_that_was_idle_for_long_serves_the_next_request(
    cluster: Cluster, model_folder: Path, reference: PreTrainedModel
) -> None:
    config = tiny_config(model_folder)
    prefill = cluster.start("prefill", "prefill-0", config, "idle:0.05")
    decode = cluster.start("decode", "decode-0", config)
    port = int(decode.address.control.rsplit(":", 1)[1])
    process = psutil.Process(prefill.process.pid)
    for name in ("before", "after"):
        cluster.serve(prefill, request(name, prompt(40)), decode=decode.address)
        assert cluster.tokens(name) == greedy(reference, prompt(40), 12)
        cluster.wait(lambda: all(each.raddr[1:] != (port,) for each in process.net_connections("tcp")))


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
