"""Counters for each pair of workers and transport."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from kvtransfer.interface import Completed
from kvtransfer.pairs import Pairs, WireSpeed
from kvtransfer.transports.registry import open_transports
from protocol.worker_to_router import PairState
from tests.kvtransfer.test_fallback import transfer, with_offer
from tests.kvtransfer.transfer_sides import ReceiverEnd, SenderEnd, make_pool
from tests.waiting import wait_until

Closing = Callable[[Any], Any]
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


def test_transfer_time_is_not_counted_twice_for_concurrent_prompts(closing: Closing) -> None:
    sender = closing(SenderEnd(["tcp"], make_pool(64, 1024 * 1024)))
    receiver = closing(ReceiverEnd(["tcp"], make_pool(64, 1024 * 1024)))
    started = time.monotonic()
    for lease in range(4):
        receiver.open(f"lease{lease}", range(16 * lease, 16 * lease + 16))
        sender.push(receiver.peer, f"lease{lease}", range(16 * lease, 16 * lease + 16))
    completed: list[Any] = []
    while len(completed) < 4:
        completed += [event for event in sender.wait_for() if isinstance(event, Completed)]
    done = of(sender.sender.pairs, "decode-0", "tcp").counters
    assert 0 < done["kv_transfer_wire_seconds_total"] <= time.monotonic() - started
    assert done["kv_transfer_wire_seconds_total"] < done["kv_transfer_seconds_total"]


def test_reasons_why_a_transport_is_not_used(closing: Closing, caplog: pytest.LogCaptureFixture) -> None:
    sender, receiver = closing(SenderEnd(["shm", "tcp"])), closing(ReceiverEnd(["shm", "tcp"]))
    elsewhere = with_offer(receiver, "shm", host_id="elsewhere")
    only_tcp = msgspec.structs.replace(
        elsewhere, worker_id="decode-1", incarnation="other", offers=elsewhere.offers[1:]
    )
    with caplog.at_level(logging.INFO, "tandem.kvtransfer"):
        assert isinstance(transfer(sender, receiver, elsewhere), Completed)
        sender.sender.connect(only_tcp)
        sender.sender.connect(msgspec.structs.replace(only_tcp, incarnation="another"))
    refused = of(sender.sender.pairs, "decode-0", "shm")
    assert (refused.refused, refused.reason, refused.in_use) == ("other_host", "another host", False)
    assert of(sender.sender.pairs, "decode-1", "shm").refused == "not_offered"
    told = [message for message in caplog.messages if message.startswith("shm does not serve")]
    assert told == ["shm does not serve decode-0: another host", "shm does not serve decode-1: not offered"]


def test_a_fallback_a_recovery_and_their_reasons(closing: Closing) -> None:
    sender = closing(SenderEnd(["shm", "tcp"], retry_interval_s=0.1))
    receiver = closing(ReceiverEnd(["shm", "tcp"]))
    broken = with_offer(receiver, "shm", address="tandem-kv-nobody-listens-here")
    assert isinstance(transfer(sender, receiver, broken), Completed)
    pairs = sender.sender.pairs
    assert of(pairs, "decode-0", "shm").refused == "unreachable"
    assert of(pairs, "decode-0", "tcp").counters["kv_transfer_fallbacks_total"] == 1
    (link,) = sender.sender._links.values()
    link._candidates[0].offer = receiver.receiver.offers[0]  # it is available again
    wait_until(lambda: sender.sender.transports() == {"decode-0": "shm"})
    wait_until(lambda: not of(pairs, "decode-0", "shm").refused)
    assert of(pairs, "decode-0", "shm").counters["kv_transfer_recoveries_total"] == 1


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
