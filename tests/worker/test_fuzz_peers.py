"""Fuzzes the port for messages between workers, as strangers, and as a worker with the keys."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import psutil
import pytest

from protocol.codec import encode
from protocol.router_to_worker import PeerGone
from protocol.worker_to_worker import ANY_LEASE, DraftFor, DraftUpdate, Fetch, Handoff, Release
from tests.fuzzing import GROWTH_BYTES, SECONDS, altered, damaged, fuzz, say, zmq_strangers
from tests.worker.harness import Cluster, RunningWorker, request, tiny_config
from tests.worker.peer_ends import PrefillEnd
from worker.setup import build_engine

PROMPT = [5, 6, 7, 8] * 9


@pytest.fixture
def worker(cluster: Cluster, model_folder: Path) -> Iterator[RunningWorker]:
    """Start a worker. Check afterwards that it lives, has not grown, answers as before, holds nothing."""
    worker = cluster.start("decode", "decode-0", tiny_config(model_folder))
    process = psutil.Process(worker.process.pid)
    cluster.serve(worker, request("before", PROMPT))
    rss = process.memory_info().rss
    yield worker
    cluster.wait_empty(worker)
    assert cluster.serve(worker, request("after", PROMPT)) == cluster.tokens("before")
    assert not SECONDS or process.memory_info().rss - rss < GROWTH_BYTES


def test_strangers(cluster: Cluster, worker: RunningWorker) -> None:
    address = urlsplit(worker.address.control)

    def check(parts: list[bytes]) -> None:
        say(address.hostname, address.port, parts)
        cluster.take_what_came()  # heartbeats would pile up here

    fuzz(check, zmq_strangers, examples=100)


def test_a_member(cluster: Cluster, worker: RunningWorker, model_folder: Path) -> None:
    peer = PrefillEnd(cluster, worker.address, *build_engine(tiny_config(model_folder)))
    asked = request("asked", PROMPT)
    reserve = peer.reserve_message(asked)
    _, token = peer.prefill(asked)
    grant = peer.reserve(asked)
    whole = [
        reserve,
        Handoff(manifest=peer.manifest(asked, grant, token)),
        Release(incarnation=grant.incarnation, lease_id=ANY_LEASE, request_id="asked"),
        Fetch(
            incarnation=grant.incarnation,
            request_id="asked",
            lease_id=grant.lease_id,
            first_block=0,
            identities=[b"i" * 16],
            receiver=worker.address,
        ),
        DraftFor(
            incarnation=grant.incarnation,
            number=1,
            given=[DraftUpdate(request_id="asked", epoch=1, start=0, token_ids=PROMPT)],
        ),
    ]
    raw = [encode(message) for message in whole]

    def check(message: bytes) -> None:
        peer.send_raw(message)
        peer.drop_replies()  # which would pile up here, as heartbeats would
        cluster.take_what_came()

    fuzz(check, damaged(raw) | altered(raw), examples=300)
    peer.close()
    gone = PeerGone(incarnation=worker.address.incarnation, worker_id=peer.name, gone=peer.incarnation)
    cluster.send(worker.worker_id, gone)
    cluster.wait_empty(worker)
    assert worker.counter("dropped_messages_total") > 0
