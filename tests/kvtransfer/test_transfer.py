"""Pushed blocks arrive over the transport that suits a pair; fallbacks are visible, and all is counted."""

from __future__ import annotations

import logging
import random
import select
import threading
import time
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch

from kvtransfer.interface import Completed, Failed, Progress, RegisteredPool, Sent, TransferError
from kvtransfer.messages import GOOD, Piece, encode, frame
from kvtransfer.pairs import Pairs, WireSpeed
from kvtransfer.transports.registry import open_transports
from protocol.ids import PeerAddress
from protocol.worker_to_router import PairState
from tests.kvtransfer.test_leases import runs
from tests.kvtransfer.transfer_sides import (
    RawPeer,
    ReceiverEnd,
    SenderEnd,
    block,
    is_over,
    make_pool,
    moved,
    push_one,
)
from tests.tiers.seeds import seeds
from tests.waiting import wait_until

Closing = Callable[[Any], Any]


def random_extents(rng: random.Random, num_sources: int, num_targets: int) -> list[tuple[int, int]]:
    """Return runs of adjacent blocks and single ones, mixed."""
    targets = list(range(num_targets))
    extents = []
    while targets and (not extents or rng.random() < 0.95):
        start = rng.randrange(len(targets))
        source = rng.randrange(num_sources)
        for target in targets[start : start + rng.randrange(1, 9)]:
            extents.append((source % num_sources, target))
            source += 1
            targets.remove(target)
    return extents


@pytest.mark.parametrize("seed", seeds(6))
@pytest.mark.parametrize("block_bytes", [48, 4096, 100_000])
def test_every_pushed_block_arrives_and_no_other_changes(
    closing: Closing, transport: str, seed: int, block_bytes: int
) -> None:
    rng = random.Random(seed)
    sender = closing(SenderEnd([transport], make_pool(97, block_bytes, seed=1)))
    receiver = closing(ReceiverEnd([transport], make_pool(130, block_bytes, seed=2)))
    extents = random_extents(rng, 97, 130)
    before = [block(receiver.pool, index) for index in range(130)]
    receiver.open("lease", [target for _, target in extents])

    sources, position = [source for source, _ in extents], 0
    while position < len(sources):
        step = rng.randrange(1, 40)
        some = sources[position : position + step]
        sender.push(receiver.peer, "lease", some, position, final=position + step >= len(sources))
        position += step
    completed = sender.wait_lease("lease")
    progress = receiver.wait_lease("lease")

    assert isinstance(completed, Completed)
    assert completed.nbytes == len(extents) * block_bytes
    assert progress == Progress("lease", len(extents), complete=True)
    expected = dict(enumerate(before)) | {target: block(sender.pool, source) for source, target in extents}
    assert all(block(receiver.pool, index) == content for index, content in expected.items())
    received = moved(receiver.receiver._core.pairs, transport, "kv_receive_bytes_total")
    assert moved(sender.sender.pairs, transport) == received == len(extents) * block_bytes
    assert sender.sender.transports() == {"decode-0": transport}


def test_pieces_larger_than_one_message(closing: Closing, transport: str) -> None:
    num_blocks = 9000
    sender = closing(SenderEnd([transport], make_pool(num_blocks, 4096, seed=1)))
    receiver = closing(ReceiverEnd([transport], make_pool(num_blocks, 4096, seed=2)))
    targets = random.Random(3).sample(range(num_blocks), num_blocks)
    receiver.open("lease", targets)
    sender.push(receiver.peer, "lease", range(num_blocks))
    events = sender.wait_for()
    sent = [event.blocks for event in events if isinstance(event, Sent)]
    assert sent == sorted(sent) and sent[-1] == num_blocks and len(sent) > 2
    assert all(
        block(receiver.pool, target) == block(sender.pool, source) for source, target in enumerate(targets)
    )


def test_a_fully_cached_prompt_needs_only_an_empty_final_push(closing: Closing, transport: str) -> None:
    sender, receiver = closing(SenderEnd([transport])), closing(ReceiverEnd([transport]))
    receiver.open("lease", [])
    sender.push(receiver.peer, "lease", [])
    assert sender.wait_lease("lease").nbytes == 0
    assert receiver.wait_lease("lease") == Progress("lease", 0, complete=True)


def test_completed_comes_last_and_progress_counts_distinct_blocks(closing: Closing, transport: str) -> None:
    sender, receiver = closing(SenderEnd([transport])), closing(ReceiverEnd([transport]))
    receiver.open("lease", [1, 2, 3])
    sender.push(receiver.peer, "lease", [5, 6], final=False)
    sender.push(receiver.peer, "lease", [7], 1, final=False)
    sender.push(receiver.peer, "lease", [8], 2)
    events = sender.wait_for()
    assert [event.blocks for event in events[:-1]] == [2, 3, 4]
    assert isinstance(events[-1], Completed)
    assert [event.blocks_received for event in receiver.wait_for()] == [2, 2, 3]
    assert block(receiver.pool, 2) == block(sender.pool, 7)


def test_a_huge_lease_does_not_starve_a_small_one(closing: Closing, transport: str) -> None:
    num_blocks = 192
    sender = closing(SenderEnd([transport], make_pool(num_blocks, 1024 * 1024)))
    receiver = closing(ReceiverEnd([transport], make_pool(num_blocks, 1024 * 1024)))
    huge = range(num_blocks - 1)
    receiver.open("huge", huge)
    receiver.open("small", [num_blocks - 1])
    sender.push(receiver.peer, "huge", huge)
    sender.push(receiver.peer, "small", [0])
    events = sender.wait_for(lambda event: is_over(event) and event.lease_id == "huge")
    order = [event.lease_id for event in events if is_over(event)]
    assert order == ["small", "huge"]


def test_bad_arguments_are_refused_by_name(closing: Closing) -> None:
    sender, receiver = closing(SenderEnd(["shm"])), closing(ReceiverEnd(["shm"]))
    for blocks, first in (([64], 0), ([-1], 0), ([0], -1), ([0], 2**31)):
        with pytest.raises(ValueError, match=r"source blocks|positions"):
            sender.push(receiver.peer, "lease", blocks, first)
    for block_ids in ([64], [-1]):
        with pytest.raises(ValueError, match="blocks of lease"):
            receiver.open("lease", block_ids)
    receiver.open("lease", [1, 2])
    with pytest.raises(ValueError, match="open already"):
        receiver.open("lease", [3])
    with pytest.raises(ValueError, match="another open lease"):
        receiver.open("other", [2, 3])
    with pytest.raises(ValueError, match="given twice"):
        receiver.open("other", [3, 3])
    with pytest.raises(ValueError, match="num_tokens"):
        receiver.open("other", [3, 4], num_tokens=3)
    with pytest.raises(ValueError, match="carrier-pigeon"):
        SenderEnd(["carrier-pigeon"])
    with pytest.raises(ValueError, match="32 bytes"):
        SenderEnd(["tcp"], key=b"short")


def with_offer(receiver: ReceiverEnd, transport: str, **changes: str) -> PeerAddress:
    """Return the receiver's address with one of its offers changed."""
    offers = [
        msgspec.structs.replace(offer, **changes) if offer.transport == transport else offer
        for offer in receiver.receiver.offers
    ]
    return msgspec.structs.replace(receiver.peer, offers=offers)


@pytest.mark.parametrize("order", [["shm", "tcp"], ["tcp", "shm"]])
def test_the_senders_order_decides(closing: Closing, order: list[str]) -> None:
    sender, receiver = closing(SenderEnd(order)), closing(ReceiverEnd(["tcp", "shm"]))
    assert sender.sender.connect(receiver.peer) == order[0]
    assert isinstance(push_one(sender, receiver), Completed)
    assert sender.sender.transports() == {"decode-0": order[0]}
    assert "fallbacks" not in sender.sender.counters()


@pytest.mark.parametrize("on_device", [False, True])
def test_a_pool_outside_of_shared_memory_uses_tcp(
    closing: Closing, caplog: pytest.LogCaptureFixture, on_device: bool
) -> None:
    """This is no fallback: no warning, and no later retry."""
    device = torch.zeros((64, 4096), dtype=torch.uint8) if on_device else None
    pool = RegisteredPool(memoryview(bytearray(64 * 4096)), 4096, 64, device=device)
    sender, receiver = closing(SenderEnd(["shm", "tcp"], pool)), closing(ReceiverEnd(["shm", "tcp"]))
    assert sender.sender.connect(receiver.peer) == "tcp"
    receiver.open("lease", [1])
    sender.push(receiver.peer, "lease", [2])
    assert isinstance(sender.wait_lease("lease"), Completed)
    assert block(receiver.pool, 1) == bytes(4096)
    assert sender.sender.transports() == {"decode-0": "tcp"}
    assert "fallbacks" not in sender.sender.counters() and not caplog.messages
    refused = next(pair for pair in sender.sender.pairs.snapshot({}) if pair.transport == "shm")
    assert refused.refused == "unavailable" and refused.reason == "the pool is not in shared memory"


def test_closing_an_idle_link_warns_of_nothing(
    closing: Closing, caplog: pytest.LogCaptureFixture, transport: str
) -> None:
    """On either side, an orderly end must raise no alarm."""
    receiver, staying = closing(ReceiverEnd([transport])), closing(SenderEnd([transport]))
    assert isinstance(push_one(staying, receiver), Completed)
    connections = _receiving()
    leaving = SenderEnd([transport])
    leaving.sender.connect(receiver.peer)
    wait_until(lambda: leaving.sender.transports() == {"decode-0": transport})
    leaving.close()
    wait_until(lambda: _receiving() == connections)
    receiver.receiver.close()
    wait_until(lambda: not staying.sender.transports())
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == []


def test_a_sender_that_ends_without_reading_an_ack_is_no_warning(
    closing: Closing, caplog: pytest.LogCaptureFixture
) -> None:
    """The kernel resets such a connection."""
    receiver, connections = closing(ReceiverEnd(["tcp"])), _receiving()
    receiver.open("lease", [1])
    raw = RawPeer.connect(receiver, "tcp", make_pool())
    raw.send_bytes(frame(encode(Piece(1, "lease", 0, 1, runs((5, 0, 1)), True))) + b"\xee" * 4096 + GOOD)
    raw.channel.ready(select.POLLIN, raw.deadline())
    raw.close()
    wait_until(lambda: _receiving() == connections)
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == []


def _receiving() -> int:
    return sum("kv-receive" in thread.name for thread in threading.enumerate())


def test_a_refused_shm_handshake_falls_back_to_tcp(closing: Closing) -> None:
    """The shm address leads to another receiver, which refuses."""
    sender, receiver = closing(SenderEnd(["shm", "tcp"])), closing(ReceiverEnd(["shm", "tcp"]))
    other = closing(ReceiverEnd(["shm"]))
    peer = with_offer(receiver, "shm", address=other.receiver.offers[0].address)
    assert sender.sender.wire_dtype(peer) == "auto", "no link to the peer yet"
    assert isinstance(push_one(sender, receiver, peer), Completed)
    assert sender.sender.transports() == {"decode-0": "tcp"}
    wait_until(lambda: other.receiver.counters().get("handshakes_refused") == 1)


def test_without_a_working_transport_every_reason_is_named(closing: Closing) -> None:
    sender, receiver = closing(SenderEnd(["shm", "tcp"])), closing(ReceiverEnd(["shm", "tcp"]))
    peer = receiver.peer
    receiver.receiver.close()
    event = transfer_to_nobody(sender, peer)
    assert "shm: " in event.reason and "tcp: " in event.reason
    assert sender.sender.counters()["failures_connect"] == 1


def test_no_common_transport(closing: Closing) -> None:
    sender, receiver = closing(SenderEnd(["shm"])), closing(ReceiverEnd(["tcp"]))
    with pytest.raises(TransferError, match="shm: not offered"):
        sender.sender.connect(receiver.peer)
    assert "no common transport" in transfer_to_nobody(sender, receiver.peer).reason


@pytest.mark.parametrize("address", ["", "no-port", "127.0.0.1:notaport", "example.invalid:1", "127.0.0.1:1"])
def test_an_unusable_tcp_address_is_a_failure_not_a_crash(closing: Closing, address: str) -> None:
    sender, receiver = closing(SenderEnd(["tcp"])), closing(ReceiverEnd(["tcp"]))
    event = transfer_to_nobody(sender, with_offer(receiver, "tcp", address=address))
    assert event.reason.startswith("tcp: ")
    assert "failures_internal" not in sender.sender.counters()


def transfer_to_nobody(sender: SenderEnd, peer: PeerAddress) -> Failed:
    sender.push(peer, "lease", [2])
    event = sender.wait_lease("lease")
    assert isinstance(event, Failed)
    return event


BLOCKS = [3, 4, 5, 9, 20, 21]
EXTENTS = 3


def of(pairs: Pairs, peer: str, transport: str, in_use: dict[str, str] | None = None) -> PairState:
    states = {(pair.peer, pair.transport): pair for pair in pairs.snapshot(in_use or {})}
    return states[peer, transport]


def test_both_ends_count_moved_bytes(closing: Closing, transport: str) -> None:
    at_receiver = Pairs()
    sender, receiver = closing(SenderEnd([transport])), closing(ReceiverEnd([transport], pairs=at_receiver))
    receiver.open("lease", range(len(BLOCKS)))
    started = time.monotonic()
    sender.push(receiver.peer, "lease", BLOCKS[:4], final=False)
    sender.push(receiver.peer, "lease", BLOCKS[4:], 4)
    event = sender.wait_lease("lease")
    assert isinstance(event, Completed)
    elapsed = time.monotonic() - started
    sent = of(sender.sender.pairs, "decode-0", transport, sender.sender.transports())
    assert sent.in_use and not sent.refused
    counters = sent.counters
    assert counters["kv_transfer_bytes_total"] == len(BLOCKS) * 4096 == event.nbytes
    assert counters["kv_transfer_pieces_total"] == 2
    assert counters["kv_transfer_extents_total"] == EXTENTS == event.num_extents
    assert counters["kv_transfers_total"] == 1
    assert 0 < counters["kv_transfer_wire_seconds_total"] <= elapsed
    assert 0 < counters["kv_transfer_busy_seconds_total"] <= counters["kv_transfer_seconds_total"] <= elapsed
    assert 0 <= counters["kv_transfer_hidden_seconds_total"] <= counters["kv_transfer_busy_seconds_total"]
    assert 0 <= counters["kv_transfer_wait_seconds_total"] <= 2 * elapsed
    receiver.wait_lease("lease")
    received = of(at_receiver, "prefill-0", transport).counters
    assert received["kv_receive_bytes_total"] == len(BLOCKS) * 4096
    assert received["kv_receive_pieces_total"] == 2
    assert 0 < received["kv_receive_seconds_total"] <= elapsed


def test_reasons_why_a_transport_is_not_used(closing: Closing, caplog: pytest.LogCaptureFixture) -> None:
    sender, receiver = closing(SenderEnd(["shm", "tcp"])), closing(ReceiverEnd(["shm", "tcp"]))
    elsewhere = with_offer(receiver, "shm", host_id="elsewhere")
    only_tcp = msgspec.structs.replace(
        elsewhere, worker_id="decode-1", incarnation="other", offers=elsewhere.offers[1:]
    )
    with caplog.at_level(logging.INFO, "tandem.kvtransfer"):
        assert isinstance(push_one(sender, receiver, elsewhere), Completed)
        sender.sender.connect(only_tcp)
        sender.sender.connect(msgspec.structs.replace(only_tcp, incarnation="another"))
    refused = of(sender.sender.pairs, "decode-0", "shm")
    assert (refused.refused, refused.reason, refused.in_use) == ("other_host", "another host", False)
    assert of(sender.sender.pairs, "decode-1", "shm").refused == "not_offered"
    told = [message for message in caplog.messages if message.startswith("shm does not serve")]
    assert told == ["shm does not serve decode-0: another host", "shm does not serve decode-1: not offered"]


def test_a_fallback_a_recovery_and_their_reasons(closing: Closing, caplog: pytest.LogCaptureFixture) -> None:
    sender = closing(SenderEnd(["shm", "tcp"], retry_interval_s=0.1))
    receiver = closing(ReceiverEnd(["shm", "tcp"]))
    broken = with_offer(receiver, "shm", address="tandem-kv-nobody-listens-here")
    with caplog.at_level(logging.INFO, "tandem.kvtransfer"):
        assert isinstance(push_one(sender, receiver, broken), Completed)
    assert any("cannot reach decode-0 over shm" in message for message in caplog.messages)
    (fallback,) = [message for message in caplog.messages if "link to decode-0 over tcp" in message]
    assert "shm: " in fallback and sender.sender.counters()["fallbacks"] == 1
    pairs = sender.sender.pairs
    assert of(pairs, "decode-0", "shm").refused == "unreachable"
    assert of(pairs, "decode-0", "tcp").counters["kv_transfer_fallbacks_total"] == 1
    (link,) = sender.sender._links.values()
    link._candidates[0].offer = receiver.receiver.offers[0]  # it is available again
    wait_until(lambda: sender.sender.transports() == {"decode-0": "shm"})
    wait_until(lambda: not of(pairs, "decode-0", "shm").refused)
    assert of(pairs, "decode-0", "shm").counters["kv_transfer_recoveries_total"] == 1
    assert push_one(sender, receiver).transport == "shm"
    wait_until(lambda: sum(thread.name.startswith("kv-send") for thread in threading.enumerate()) == 1)


def test_errors_by_kind_and_peer(closing: Closing) -> None:
    at_receiver = Pairs()
    sender, receiver = closing(SenderEnd(["tcp"])), closing(ReceiverEnd(["tcp"], pairs=at_receiver))
    sender.push(receiver.peer, "never opened", [1])
    sender.wait_lease("never opened")
    wait_until(lambda: bool(at_receiver.snapshot({})))  # it answers first
    assert of(sender.sender.pairs, "decode-0", "tcp").counters["kv_transfers_failed_total"] == 1
    for pairs, peer in ((sender.sender.pairs, "decode-0"), (at_receiver, "prefill-0")):
        assert of(pairs, peer, "tcp").counters["kv_transfer_errors_total{kind=unknown_lease}"] == 1


def test_a_missing_transport_is_reported_without_a_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise OSError("no such device")

    monkeypatch.setattr("kvtransfer.transports.ucx.UcxTransport", fail)
    pairs = Pairs()
    assert [wire.name for wire in open_transports(["ucx", "tcp"], make_pool(), "here", pairs=pairs)] == [
        "tcp"
    ]
    assert of(pairs, "", "ucx").refused == "unavailable"
    assert of(pairs, "", "ucx").reason == "no such device"


def test_the_number_of_peers_is_bounded() -> None:
    pairs = Pairs(max_peers=4)
    for number in range(20):
        pairs.add("decode-0", "tcp", {"kv_transfer_pieces_total": 1})
        pairs.add(f"decode-{number}", "tcp", {"kv_transfer_pieces_total": 1})
    states = pairs.snapshot({})
    assert sorted(pair.peer for pair in states) == ["decode-0", "decode-17", "decode-18", "decode-19"]
    assert of(pairs, "decode-0", "tcp").counters["kv_transfer_pieces_total"] == 21


LATENCY_S, BYTES_PER_S = 2e-4, 5e8


def test_latency_and_bandwidth_are_separated():
    speed, rng = WireSpeed(), random.Random(0)
    pieces = nbytes = seconds = 0.0
    for _ in range(60):
        count = rng.randint(1, 20)
        size = count * rng.randint(1_000, 2_000_000)
        pieces, nbytes = pieces + count, nbytes + size
        seconds += (count * LATENCY_S + size / BYTES_PER_S) * rng.uniform(0.9, 1.1)
        speed.look(pieces, nbytes, seconds)
        speed.look(pieces, nbytes, seconds)
    assert speed.latency_s == pytest.approx(LATENCY_S, rel=0.2)
    assert speed.bytes_per_s == pytest.approx(BYTES_PER_S, rel=0.2)


def test_equal_pieces_only_give_the_bandwidth():
    speed = WireSpeed()
    assert speed.bytes_per_s == 0.0
    for count in range(1, 30):
        speed.look(count, count * 1e6, count * 4e-3)
    assert (speed.latency_s, speed.bytes_per_s) == (0.0, pytest.approx(1e6 / 4e-3))


def test_each_pair_and_transport_has_its_own_figures():
    pairs = Pairs()
    for transport, seconds in (("tcp", 0.5), ("shm", 0.01)):
        moved = {"kv_transfer_pieces_total": 4, "kv_transfer_uncoded_bytes_total": 1e6}
        pairs.add("decode-0", transport, moved | {"kv_transfer_wire_seconds_total": seconds})
    pairs.snapshot({})
    speeds = {pair.transport: pair.bytes_per_s for pair in pairs.snapshot({"decode-0": "shm"})}
    assert speeds == pytest.approx({"tcp": 2e6, "shm": 1e8})
