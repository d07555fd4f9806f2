"""Fuzzes the KV ports: before the handshake, within it, and from a sender that has the key."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import strategies as st

from kvtransfer.interface import Completed
from kvtransfer.messages import (
    GOOD,
    Ack,
    Challenge,
    Hello,
    HelloAnswer,
    Piece,
    Proof,
    SealedAnswer,
    decode,
    encode,
    frame,
    frame_length,
    unframe,
)
from protocol.errors import ProtocolError
from protocol.handoff import SegmentInfo
from tests.fuzzing import SECONDS, altered, damaged, each_edge, fuzz, too_deep
from tests.kvtransfer.test_leases import runs
from tests.kvtransfer.transfer_sides import RawPeer, ReceiverEnd, SenderEnd, make_pool, push_one
from tests.waiting import wait_until

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
    HelloAnswer(worker_id="w", incarnation="i", refused_field="segments", reason="no"),
    SealedAnswer(body=b"b", mac=b"m" * 32),
    Piece(1, "lease", 0, 1, runs((5, 0, 2), (9, 2, 1)), True, checksum=b"12345678"),
    Ack(1, "checksum mismatch", True),
]
PLAIN = [encode(message) for message in MESSAGES]
FRAMES = [frame(message) for message in PLAIN]
BYTES = {
    "nonce": range(32, 33),
    "mac": range(32, 33),
    "checksum": range(8, 9),
    "body": range(4097),
    "runs": range(12 * 4096 + 1),
}
"""The allowed lengths of each field."""


def check_bounds(field: str, value: Any) -> None:
    """Check that a decoded field is within its bounds."""
    match value:
        case msgspec.Struct():
            for name in value.__struct_fields__:
                check_bounds(name, getattr(value, name))
        case int():
            assert 0 <= value < (16 if field == "block_pool" else 2**62), field
            assert field != "num_parts" or 1 <= value <= 4
        case float():
            assert 0 <= value <= 1e9, field
        case bytes():
            assert len(value) in BYTES[field], field
        case str():
            assert len(value) <= (512 if field in ("error", "reason") else 128), field
            assert value or not field.endswith(("id", "incarnation", "transport")), field
        case list() | tuple():
            assert len(value) <= (32 if field in ("segments", "wire") else 8), field
            for item in value:
                check_bounds("item", item)


def check_decoded(example: tuple[int, bytes]) -> None:
    place, raw = example
    kind = type(MESSAGES[place])
    try:
        message = decode(raw, kind)
    except ProtocolError:
        return
    check_bounds("", message)
    assert decode(encode(message), kind) == message


def test_decoded_messages_are_within_bounds() -> None:
    for place, raw in enumerate(PLAIN):
        for changed in (*each_edge(raw), too_deep(raw)):
            check_decoded((place, changed))


def test_fuzz_the_decoders() -> None:
    places = st.sampled_from(range(len(MESSAGES)))
    any_bytes = damaged(PLAIN) | st.binary(max_size=200)
    fitting = places.flatmap(lambda place: st.tuples(st.just(place), altered([PLAIN[place]])))
    fuzz(check_decoded, st.tuples(places, any_bytes) | fitting, examples=400)


def test_fuzz_frames() -> None:
    def check(raw: bytes) -> None:
        try:
            assert frame_length(raw[:4]) <= 64 * 1024
            payload = unframe(bytearray(raw))
        except ProtocolError:
            return
        assert frame(bytes(payload)) == raw

    fuzz(check, damaged(FRAMES) | st.binary(min_size=4, max_size=8), examples=500)


def test_fuzz_strangers(closing: Closing, transport: str, caplog: pytest.LogCaptureFixture) -> None:
    """Strangers must not fill the log either."""
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

    broken = (damaged(PLAIN) | altered(PLAIN)).map(frame)
    fuzz(check, st.lists(damaged(FRAMES) | broken, min_size=1, max_size=3), examples=60)
    assert len(caplog.records) <= 1 + SECONDS / 5
    check_all_is_well(closing, receiver, transport)


def test_fuzz_a_sender_with_the_key(
    closing: Closing, transport: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever it sends, nothing is written outside of the lease."""
    caplog.set_level(logging.ERROR)  # do not keep a line for each
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

    whole = b"\xee" * 3 * 4096 + GOOD
    check((encode(piece), whole))
    wait_until(lambda: any(receiver.pool.buffer[4096 : 4 * 4096]))
    rest = st.sampled_from([b"", b"\xee" * 100, whole, b"\xee" * 20_000])
    pieces = damaged([encode(piece)]) | altered([encode(piece)])
    fuzz(check, st.tuples(pieces, rest), examples=40)
    wait_until(lambda: not any("kv-receive" in thread.name for thread in threading.enumerate()))
    assert not any(receiver.pool.buffer[:4096]) and not any(receiver.pool.buffer[4 * 4096 :])
    check_all_is_well(closing, receiver, transport)


def check_all_is_well(closing: Closing, receiver: ReceiverEnd, transport: str) -> None:
    wait_until(lambda: not any("kv-receive" in thread.name for thread in threading.enumerate()))
    assert "failures_internal" not in receiver.receiver.counters()
    receiver.receiver.close_lease("lease")
    assert isinstance(push_one(closing(SenderEnd([transport])), receiver), Completed)
