"""The handshake of data connections: strangers are refused and learn nothing."""

from __future__ import annotations

import hmac
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest

from kvtransfer.interface import Completed, Failed
from kvtransfer.messages import WIRE_VERSION, Challenge, Hello, Proof, SealedAnswer, decode, encode, frame
from kvtransfer.streams.handshake import HandshakeRefusedError, Identity, introduce
from kvtransfer.transports.shm import ShmTransport
from protocol.handoff import SegmentInfo
from protocol.ids import PeerAddress
from tests.kvtransfer.transfer_sides import (
    KEY,
    RawPeer,
    RawReceiver,
    ReceiverEnd,
    SenderEnd,
    make_pool,
    push_one,
)
from tests.waiting import wait_until

Closing = Callable[[Any], Any]
OTHER_KEY = bytes(32)


def test_a_sender_with_another_key_is_refused(closing: Closing, transport: str) -> None:
    sender, receiver = closing(SenderEnd([transport], key=OTHER_KEY)), closing(ReceiverEnd([transport]))
    before = bytes(receiver.pool.buffer)
    event = push_one(sender, receiver)
    assert isinstance(event, Failed) and "closed the connection during the handshake" in event.reason
    assert receiver.receiver.counters()["handshakes_refused"] == 1
    assert "connections_accepted" not in receiver.receiver.counters()
    assert bytes(receiver.pool.buffer) == before


@pytest.mark.parametrize("reflected", [False, True])
def test_a_receiver_without_the_key_is_refused(closing: Closing, transport: str, reflected: bool) -> None:
    """A receiver that accepts every sender, or that returns the sender's own proof, proves nothing."""
    sender = closing(SenderEnd([transport]))
    impostor = closing(RawReceiver(transport, make_pool()))
    sender.push(impostor.peer, "lease", [1])
    raw = closing(impostor.accept_unexamined())
    raw.channel.recv(Hello, raw.deadline())
    raw.send(Challenge(bytes(32)))
    proof = raw.channel.recv(Proof, raw.deadline())
    raw.send(SealedAnswer(b"", proof.mac) if reflected else SealedAnswer(b"\x80", bytes(32)))
    event = sender.wait_lease("lease")
    assert isinstance(event, Failed) and "does not hold the cluster's key" in event.reason
    assert raw.is_closed_by_peer()


def a_hello(transport: str, incarnation: str) -> Hello:
    return Hello(WIRE_VERSION, bytes(32), transport, "raw", "raw-1", incarnation, 4096, 64, [], [])


def test_a_proof_cannot_be_replayed(closing: Closing, transport: str) -> None:
    """It sends the Hello and Proof of an earlier good handshake, but the receiver's nonce has changed."""
    receiver = closing(ReceiverEnd([transport]))
    hello = encode(a_hello(transport, receiver.incarnation))
    first = closing(RawPeer.connect_only(receiver, transport))
    first.send_bytes(frame(hello))
    challenge = bytes(first.channel.recv_frame(first.deadline()))
    mac = hmac.new(KEY, b"tandem-kv sender", "sha256")
    for part in (hello, challenge):
        mac.update(len(part).to_bytes(4, "little") + part)
    proof = Proof(mac.digest())
    first.send(proof)
    first.channel.recv(SealedAnswer, first.deadline())

    second = closing(RawPeer.connect_only(receiver, transport))
    second.send_bytes(frame(hello))
    assert bytes(second.channel.recv_frame(second.deadline())) != challenge
    second.send(proof)
    assert second.is_closed_by_peer()
    assert receiver.receiver.counters()["handshakes_refused"] == 1


def test_a_stranger_sees_only_a_random_nonce(closing: Closing, transport: str) -> None:
    receiver = closing(ReceiverEnd([transport]))
    raw = closing(RawPeer.connect_only(receiver, transport))
    raw.send(a_hello(transport, "guess"))
    decode(raw.channel.recv_frame(raw.deadline()), Challenge)
    raw.send(Proof(bytes(32)))
    assert raw.is_closed_by_peer()


def test_another_incarnation_is_stale(closing: Closing, transport: str) -> None:
    sender, receiver = closing(SenderEnd([transport])), closing(ReceiverEnd([transport]))
    old = PeerAddress(
        worker_id="decode-0", incarnation="earlier", control="-", offers=receiver.receiver.offers
    )
    event = push_one(sender, receiver, old)
    assert isinstance(event, Failed) and "stale" in event.reason and "receiver_incarnation" in event.reason
    assert isinstance(push_one(sender, receiver), Completed)


BF16 = SegmentInfo(name="target", dtype="bfloat16", shape=(1, 2, 16, 4, 16))


@pytest.mark.parametrize(
    ("field", "theirs", "ours"),
    [
        ("block_bytes", {"block_bytes": 2048}, {}),
        ("segments", {"segments": (BF16,)}, {}),
        ("segments", {"segments": (BF16,)}, {"segments": (BF16, BF16)}),
    ],
)
def test_unlike_pools_are_refused_by_name(
    closing: Closing, transport: str, field: str, theirs: dict[str, Any], ours: dict[str, Any]
) -> None:
    sender = closing(SenderEnd([transport], replace(make_pool(), **theirs)))
    receiver = closing(ReceiverEnd([transport], replace(make_pool(), **ours)))
    event = push_one(sender, receiver)
    assert isinstance(event, Failed) and f"refused for {field}" in event.reason
    wait_until(lambda: receiver.receiver.counters().get("handshakes_refused") == 1)


def test_a_silent_connection_is_dropped_at_the_deadline(closing: Closing, transport: str) -> None:
    """The deadline of this receiver. An earlier connection to a more patient receiver is still there."""
    patient = closing(ReceiverEnd([transport], handshake_timeout_s=60.0))
    earlier = closing(RawPeer.connect_only(patient, transport))
    receiver = closing(ReceiverEnd([transport], handshake_timeout_s=0.3))
    raw = closing(RawPeer.connect_only(receiver, transport))
    assert raw.is_closed_by_peer()
    assert not earlier.channel.hung_up()
    wait_until(lambda: receiver.receiver.counters().get("handshakes_refused") == 1)


def test_a_trickling_connection_is_dropped_at_the_deadline(closing: Closing, transport: str) -> None:
    """A byte now and then does not extend the deadline."""
    receiver = closing(ReceiverEnd([transport], handshake_timeout_s=0.5))
    raw = closing(RawPeer.connect_only(receiver, transport))
    began = time.monotonic()
    raw.send_bytes((4000).to_bytes(4, "little"))
    with suppress(OSError):
        while time.monotonic() < began + 20:
            time.sleep(0.02)
            raw.send_bytes(b"\x00")
    assert time.monotonic() < began + 20
    wait_until(lambda: receiver.receiver.counters().get("handshakes_refused") == 1)


def test_pending_handshakes_are_bounded_and_end(closing: Closing, transport: str) -> None:
    receiver = closing(ReceiverEnd([transport], handshake_timeout_s=3.0, max_pending_handshakes=3))
    silent = [closing(RawPeer.connect_only(receiver, transport)) for _ in range(10)]
    wait_until(lambda: receiver.receiver.counters().get("handshakes_dropped") == 7)
    assert all(raw.is_closed_by_peer() for raw in silent)
    assert isinstance(push_one(closing(SenderEnd([transport])), receiver), Completed)


def test_our_side_names_the_refusal(closing: Closing) -> None:
    receiver = closing(ReceiverEnd(["tcp"]))
    raw = closing(RawPeer.connect_only(receiver, "tcp"))
    identity = Identity(KEY, "raw", "raw-1", make_pool())
    with pytest.raises(HandshakeRefusedError, match="transport"):
        introduce(raw.channel, identity, ShmTransport(), receiver.incarnation, raw.deadline())
