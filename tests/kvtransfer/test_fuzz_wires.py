"""Any bytes at the ports for KV: before the handshake, within it, and from a sender that has the key."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import strategies as st

from kvtransfer.framing.channel import decode, encode, frame, frame_length, unframe
from kvtransfer.framing.messages import Ack, Answer, Challenge, Hello, Piece, Proof, SealedAnswer
from kvtransfer.interface import Completed
from protocol.errors import ProtocolError
from protocol.handoff import SegmentInfo
from tests.fuzzing import SECONDS, damaged, fuzz
from tests.kvtransfer.test_leases import runs
from tests.kvtransfer.transfer_sides import RawPeer, ReceiverEnd, SenderEnd, make_pool, wait_until

Closing = Callable[[Any], Any]
SEGMENT = SegmentInfo(name="target", dtype="bfloat16", shape=(8, 2, 16, 4, 64))
HELLO = Hello(
    version=6,
    nonce=b"n" * 32,
    transport="tcp",
    worker_id="raw",
    incarnation="raw-1",
    receiver_incarnation="receiver",
    block_bytes=4096,
    num_blocks=64,
    segments=[SEGMENT],
    wire=[SEGMENT],
)
MESSAGES = [
    HELLO,
    Challenge(nonce=b"n" * 32),
    Proof(mac=b"m" * 32),
    Answer(worker_id="w", incarnation="i", refused_field="segments", reason="no"),
    SealedAnswer(body=b"b", mac=b"m" * 32),
    Piece(1, "lease", 0, 1, runs((5, 0, 2), (9, 2, 1)), True, checksum=b"12345678"),
    Ack(1, "checksum mismatch", True),
]


def test_fuzz_the_decoders() -> None:
    def check(example: tuple[int, bytes]) -> None:
        index, raw = example
        kind = type(MESSAGES[index])
        try:
            message = decode(raw, kind)
        except ProtocolError:
            return
        assert decode(encode(message), kind) == message

    raws = damaged([encode(message) for message in MESSAGES]) | st.binary(max_size=200)
    fuzz(check, st.tuples(st.integers(0, len(MESSAGES) - 1), raws), examples=500)


def test_fuzz_frames() -> None:
    def check(raw: bytes) -> None:
        try:
            frame_length(raw[:4])
            payload = unframe(bytearray(raw))
        except ProtocolError:
            return
        assert frame(bytes(payload)) == raw

    fuzz(check, damaged([frame(encode(message)) for message in MESSAGES]), examples=500)


def test_fuzz_strangers(closing: Closing, transport: str, caplog: pytest.LogCaptureFixture) -> None:
    """Nor do they fill the log."""
    receiver = closing(ReceiverEnd([transport], handshake_timeout_s=0.5, max_pending_handshakes=100))

    def check(parts: list[bytes]) -> None:
        raw = RawPeer.connect_only(receiver, transport)
        try:
            for part in parts:
                raw.send_bytes(part)
        except OSError:
            pass  # refused already
        finally:
            raw.close()

    frames = damaged([frame(encode(message)) for message in MESSAGES])
    broken = damaged([encode(message) for message in MESSAGES]).map(frame)
    fuzz(check, st.lists(frames | broken, min_size=1, max_size=3), examples=60)
    assert len(caplog.records) <= 1 + SECONDS / 5
    check_all_is_well(closing, receiver, transport)


def test_fuzz_a_sender_with_the_key(
    closing: Closing, transport: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing is written outside of the lease, whatever it says."""
    caplog.set_level(logging.ERROR)  # a line for each is not kept
    receiver = closing(ReceiverEnd([transport], progress_timeout_s=0.5))
    receiver.open("lease", [1, 2, 3])
    receiver.pool.buffer[:] = bytes(len(receiver.pool.buffer))
    source = make_pool()
    piece = Piece(1, "lease", 0, 1, runs((5, 0, 2), (9, 2, 1)), False)

    def check(example: tuple[bytes, bytes]) -> None:
        message, rest = example
        raw = RawPeer.connect(receiver, transport, source)
        try:
            raw.send_bytes(frame(message))
            raw.send_bytes(rest)
        except OSError:
            pass
        finally:
            raw.close()

    rest = st.sampled_from([b"", b"\xee" * 100, b"\xee" * 3 * 4096 + b"good", b"\xee" * 20_000])
    fuzz(check, st.tuples(damaged([encode(piece)]), rest), examples=40)
    wait_until(lambda: not any("kv-receive" in thread.name for thread in threading.enumerate()))
    assert not any(receiver.pool.buffer[:4096]) and not any(receiver.pool.buffer[4 * 4096 :])
    check_all_is_well(closing, receiver, transport)


def check_all_is_well(closing: Closing, receiver: ReceiverEnd, transport: str) -> None:
    wait_until(lambda: not any("kv-receive" in thread.name for thread in threading.enumerate()))
    assert "failures_internal" not in receiver.receiver.counters()
    sender = closing(SenderEnd([transport]))
    receiver.open("afterwards", [9])
    sender.push(receiver.peer, "afterwards", [9])
    assert isinstance(sender.wait_lease("afterwards"), Completed)
