"""Failures that users of other disaggregated servers reported, tried here (see `docs/kv-transfer.md`)."""

from __future__ import annotations

import time
from pathlib import Path

import msgspec
import psutil
import pytest
from transformers import PreTrainedModel

from engine.engine import Engine
from kvtransfer.interface import RegisteredPool
from protocol.worker_to_worker import Handoff, Reserve
from tests.worker.harness import Cluster, RunningWorker, request, tiny_config
from tests.worker.peer_ends import DecodeEnd, closing
from tests.worker.test_worker_handoff import prompt
from tests.worker.tiny_model import greedy
from worker.setup import build_engine

BLOCK_BYTES = 16 * 512
ROOM = 24


@pytest.fixture(scope="module")
def source(model_folder: Path) -> tuple[Engine, RegisteredPool]:
    return build_engine(tiny_config(model_folder))


def started(cluster: Cluster, name: str) -> bool:
    return "decode-0" in cluster.sources(name)


def test_cancelled_requests_free_their_room_at_once(cluster: Cluster, model_folder: Path) -> None:
    """A client that retries and cancels must not fill the pool until leases expire."""
    config = tiny_config(model_folder, max_model_len=128, handoff_timeout=60.0)
    small = tiny_config(
        model_folder, max_model_len=128, handoff_timeout=60.0, kv_cache_memory_bytes=ROOM * BLOCK_BYTES
    )
    prefill = cluster.start("prefill", "prefill-0", config)
    decode = cluster.start("decode", "decode-0", small, "slow:0.02")
    for attempt in range(6):
        names = [f"r{attempt}-{index}" for index in range(3)]  # as many as fit
        for index, name in enumerate(names):
            cluster.generate(prefill, request(name, prompt(100, index), max_tokens=25), decode.address)
        cluster.wait(lambda names=names: all(started(cluster, name) for name in names))
        cluster.abort(*names)
    cluster.wait_empty(prefill, decode)
    assert decode.counter("reservations_expired_total") == prefill.counter("handoffs_expired_total") == 0


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


def test_an_unlike_pool_is_an_error_that_names_the_difference(
    cluster: Cluster, model_folder: Path, source: tuple[Engine, RegisteredPool]
) -> None:
    _, pool = source
    others = tuple(msgspec.structs.replace(segment, name="other") for segment in pool.segments)
    unlike = RegisteredPool(pool.buffer, pool.block_bytes, pool.num_blocks, others, pool.memory_fd)
    prefill = cluster.start("prefill", "prefill-0", tiny_config(model_folder, handoff_timeout=60.0))
    for peer in closing(DecodeEnd(cluster, unlike)):
        cluster.generate(prefill, request("r", prompt(50)), peer.address)
        peer.reply(peer.grant(peer.receive(Reserve).request))
        failure = cluster.handover_failed("r")
        assert failure.error_kind == "transfer"
        assert "refused for segments" in failure.reason
        cluster.redirect(prefill, "r", None)
        cluster.run("r")
    cluster.wait_empty(prefill)


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
        assert time.monotonic() - asked < 10


@pytest.fixture
def forgetful(cluster: Cluster, model_folder: Path) -> tuple[RunningWorker, RunningWorker]:
    config = tiny_config(model_folder)
    prefill = cluster.start("prefill", "prefill-0", config, "idle:0.05")
    return prefill, cluster.start("decode", "decode-0", config)


def test_a_pair_that_was_idle_for_long_serves_the_next_request(
    cluster: Cluster, forgetful: tuple[RunningWorker, RunningWorker], reference: PreTrainedModel
) -> None:
    prefill, decode = forgetful
    port = int(decode.address.control.rsplit(":", 1)[1])
    process = psutil.Process(prefill.process.pid)
    for name in ("before", "after"):
        cluster.generate(prefill, request(name, prompt(40)), decode.address)
        cluster.run(name)
        assert cluster.tokens(name) == greedy(reference, prompt(40), 12)
        cluster.wait(lambda: all(each.raddr[1:] != (port,) for each in process.net_connections("tcp")))
