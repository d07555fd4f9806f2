"""A real decode worker with the test as prefill worker: every order of events, every refusal."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedModel

from engine.engine import Engine
from kvtransfer.interface import RegisteredPool, Sent
from protocol.worker_to_worker import HandoffAck, Reserved, ReserveRefused
from tests.worker.harness import Cluster, RunningWorker, request, tiny_config
from tests.worker.peer_ends import PrefillEnd, closing
from tests.worker.tiny_model import VOCAB_SIZE, greedy
from worker.setup import build_engine

_numbers = itertools.count()


@pytest.fixture(scope="module")
def source(model_folder: Path) -> tuple[Engine, RegisteredPool]:
    return build_engine(tiny_config(model_folder))


@pytest.fixture
def decode(cluster: Cluster, model_folder: Path) -> RunningWorker:
    return cluster.start("decode", "decode-0", tiny_config(model_folder))


@pytest.fixture
def peer(
    cluster: Cluster, decode: RunningWorker, source: tuple[Engine, RegisteredPool]
) -> Iterator[PrefillEnd]:
    yield from closing(PrefillEnd(cluster, decode.address, *source))


def new_request(length: int = 50, **changes: Any) -> Any:
    number = next(_numbers)
    prompt = random.Random(number).choices(range(1, VOCAB_SIZE), k=length)
    return request(f"r{number}", prompt, **changes)


def continuation(reference: PreTrainedModel, req: Any, first_token: int) -> list[int]:
    """Return the tokens that the decode worker streams: all but the prefill worker's first."""
    expected = greedy(reference, req.prompt_token_ids, req.sampling.max_tokens)
    assert expected[0] == first_token
    return expected[1:]


ORDERS = {
    "hand-off before any data": ["hand off", "first", "rest"],
    "everything twice": ["again", "first", "again", "hand off", "rest", "hand off"],
}


@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS.keys())
def test_every_order_of_events_gives_the_same_tokens(
    cluster: Cluster, decode: RunningWorker, peer: PrefillEnd, reference: PreTrainedModel, order: list[str]
) -> None:
    req = new_request()
    blocks, first_token = peer.prefill(req)
    grant = peer.reserve(req)
    assert len(grant.extents[0].blocks) == 4 and grant.covered == 0
    for event in order:
        match event:
            case "first":
                peer.push(grant, blocks, 0, 2)
            case "rest":
                peer.push(grant, blocks, 2)
            case "hand off":
                peer.hand_off(req, grant, first_token)
            case "again":
                assert peer.reserve(req) == grant
    assert peer.receive(HandoffAck).error is None
    cluster.run(req.request_id)
    assert cluster.tokens(req.request_id) == continuation(reference, req, first_token)
    cluster.wait_empty(decode)
    peer.engine.abort(req.request_id)


def test_reservations_wait_in_order(
    cluster: Cluster, model_folder: Path, source: tuple[Engine, RegisteredPool]
) -> None:
    small = tiny_config(model_folder, max_model_len=256, kv_cache_memory_bytes=17 * 16 * 512)
    decode = cluster.start("decode", "decode-0", small)
    for peer in closing(PrefillEnd(cluster, decode.address, *source)):
        first, second, third = new_request(200), new_request(100), new_request(16)
        grant = peer.reserve(first)
        peer.send(peer.reserve_message(second))
        assert peer.silent(0.5)
        peer.send(peer.reserve_message(third, ttl_s=0.5))  # it would fit, but must not overtake
        refused = peer.receive(ReserveRefused)
        assert (refused.request_id, refused.error_kind) == (third.request_id, "overloaded")
        cluster.refresh(decode)
        assert decode.used_blocks == len(grant.extents[0].blocks)
        peer.release(first, grant.lease_id)
        granted = peer.receive(Reserved)
        assert granted.request_id == second.request_id
        peer.release(second, granted.lease_id)
        cluster.wait_empty(decode)


def test_an_impossible_request_is_refused(peer: PrefillEnd) -> None:
    req = new_request(1000, max_tokens=100)
    peer.send(peer.reserve_message(req))
    refused = peer.receive(ReserveRefused)
    assert refused.error_kind == "invalid"
    assert "max_tokens" in refused.reason


def test_a_dead_prefill_worker_frees_its_leases_at_once(
    cluster: Cluster, decode: RunningWorker, peer: PrefillEnd
) -> None:
    req = new_request()
    blocks, _ = peer.prefill(req)
    grant = peer.reserve(req, ttl_s=60.0)
    peer.push(grant, blocks, 0, 2)
    peer.pushed(grant, Sent)
    cluster.refresh(decode)
    assert decode.used_blocks == 4
    peer.sender.close()
    cluster.wait_empty(decode)
    assert decode.counter("kv_transfer_failures_total") == 1
    peer.engine.abort(req.request_id)
