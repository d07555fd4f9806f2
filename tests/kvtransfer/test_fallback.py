"""The choice of a pair's transport, and visible fallbacks."""

from __future__ import annotations

import logging
import select
import threading
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch

from kvtransfer.interface import Completed, Failed, RegisteredPool, TransferError
from kvtransfer.messages import GOOD, Piece, encode, frame
from protocol.ids import PeerAddress
from tests.kvtransfer.test_leases import runs
from tests.kvtransfer.transfer_sides import RawPeer, ReceiverEnd, SenderEnd, block, make_pool, moved
from tests.waiting import wait_until

Closing = Callable[[Any], Any]


def with_offer(receiver: ReceiverEnd, transport: str, **changes: str) -> PeerAddress:
    """Return the receiver's address with one of its offers changed."""
    offers = [
        msgspec.structs.replace(offer, **changes) if offer.transport == transport else offer
        for offer in receiver.receiver.offers
    ]
    return msgspec.structs.replace(receiver.peer, offers=offers)


def transfer(sender: SenderEnd, receiver: ReceiverEnd, peer: PeerAddress) -> Any:
    receiver.open("lease", [1])
    sender.push(peer, "lease", [2])
    event = sender.wait_lease("lease")
    if isinstance(event, Completed):
        assert block(receiver.pool, 1) == block(sender.pool, 2)
    return event


@pytest.mark.parametrize("order", [["shm", "tcp"], ["tcp", "shm"]])
def test_the_senders_order_decides(closing: Closing, order: list[str]) -> None:
    sender, receiver = closing(SenderEnd(order)), closing(ReceiverEnd(["tcp", "shm"]))
    assert sender.sender.connect(receiver.peer) == order[0]
    assert isinstance(transfer(sender, receiver, receiver.peer), Completed)
    assert sender.sender.transports() == {"decode-0": order[0]}
    assert "fallbacks" not in sender.sender.counters()


def test_different_hosts_use_tcp(closing: Closing) -> None:
    sender, receiver = closing(SenderEnd(["shm", "tcp"])), closing(ReceiverEnd(["shm", "tcp"]))
    peer = with_offer(receiver, "shm", host_id="elsewhere")
    assert sender.sender.connect(peer) == "tcp"
    assert isinstance(transfer(sender, receiver, peer), Completed)


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


def test_a_broken_shm_offer_falls_back_to_tcp_with_a_warning(
    closing: Closing, caplog: pytest.LogCaptureFixture
) -> None:
    sender, receiver = closing(SenderEnd(["shm", "tcp"])), closing(ReceiverEnd(["shm", "tcp"]))
    peer = with_offer(receiver, "shm", address="tandem-kv-nobody-listens-here")
    with caplog.at_level(logging.INFO, "tandem.kvtransfer"):
        assert isinstance(transfer(sender, receiver, peer), Completed)
    assert sender.sender.transports() == {"decode-0": "tcp"}
    assert sender.sender.connect(peer) == "tcp"
    assert sender.sender.counters()["fallbacks"] == 1
    assert moved(sender.sender.pairs, "tcp") == 4096
    assert any("cannot reach decode-0 over shm" in message for message in caplog.messages)
    (fallback,) = [message for message in caplog.messages if "link to decode-0 over tcp" in message]
    assert "shm: " in fallback


def test_closing_an_idle_link_warns_of_nothing(
    closing: Closing, caplog: pytest.LogCaptureFixture, transport: str
) -> None:
    """On either side, an orderly end must raise no alarm."""
    receiver, staying = closing(ReceiverEnd([transport])), closing(SenderEnd([transport]))
    assert isinstance(transfer(staying, receiver, receiver.peer), Completed)
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
    assert isinstance(transfer(sender, receiver, peer), Completed)
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
