"""Mutual authentication by a keyed challenge, and agreement on the content of the two pools.

    sender -> receiver   Hello      (nonce, ids, pool)
    receiver -> sender   Challenge  (nonce)
    sender -> receiver   Proof      HMAC-SHA256(key, "sender", Hello, Challenge)
    receiver -> sender   HelloAnswer with HMAC-SHA256(key, "receiver", Hello, Challenge, HelloAnswer)

Both digests cover everything sent so far, so ids, incarnations and pool can't be swapped, nothing can be
replayed (each side chose a nonce), and neither side's digest can be reflected (role labels). The receiver
sends nothing but a random nonce before the sender has proved itself.
"""

from __future__ import annotations

import hmac
import os
from dataclasses import dataclass

from kvtransfer.blocks.extents import Mode
from kvtransfer.blocks.layout import LayoutError, block_bytes, conversion_problem, wire_segments
from kvtransfer.interface import RegisteredPool, TransferError
from kvtransfer.messages import (
    NONCE_BYTES,
    WIRE_VERSION,
    Challenge,
    Channel,
    Hello,
    HelloAnswer,
    Proof,
    SealedAnswer,
    decode,
    encode,
    frame,
)
from kvtransfer.transports.transport import Transport
from protocol.errors import ProtocolError

KEY_BYTES = 32


class HandshakeRefusedError(TransferError):
    """The other side refuses us, or refuses our pool."""


@dataclass(frozen=True)
class Identity:
    """One side's part of every handshake. `checksum` applies to the pieces that this side sends."""

    key: bytes
    worker_id: str
    incarnation: str
    pool: RegisteredPool
    checksum: Mode = "off"

    def __post_init__(self) -> None:
        if len(self.key) != KEY_BYTES:
            raise ValueError(f"key must be {KEY_BYTES} bytes, not {len(self.key)}")


def _digest(key: bytes, role: bytes, *transcript: bytes | bytearray) -> bytes:
    mac = hmac.new(key, b"tandem-kv " + role, "sha256")
    for part in transcript:
        mac.update(len(part).to_bytes(4, "little"))
        mac.update(part)
    return mac.digest()


def introduce(
    channel: Channel, ours: Identity, transport: Transport, receiver_incarnation: str, deadline: float
) -> bool:
    """Run the sender's side; return whether pieces may be coded. Raises HandshakeRefusedError."""
    pool = ours.pool
    hello = Hello(
        version=WIRE_VERSION,
        nonce=os.urandom(NONCE_BYTES),
        transport=transport.name,
        worker_id=ours.worker_id,
        incarnation=ours.incarnation,
        receiver_incarnation=receiver_incarnation,
        block_bytes=pool.block_bytes,
        num_blocks=pool.num_blocks,
        segments=list(pool.segments),
        wire=list(wire_segments(pool.segments, transport.wire_dtype)),
        checksum=ours.checksum,
    )
    spoken = encode(hello)
    channel.send_all(frame(spoken), deadline)
    try:
        challenge = channel.recv_frame(deadline)
        decode(challenge, Challenge)
        channel.send(Proof(_digest(ours.key, b"sender", spoken, challenge)), deadline)
        sealed = channel.recv(SealedAnswer, deadline)
    except ConnectionError as error:
        raise HandshakeRefusedError("the receiver closed the connection during the handshake") from error
    if not hmac.compare_digest(sealed.mac, _digest(ours.key, b"receiver", spoken, challenge, sealed.body)):
        raise HandshakeRefusedError("the receiver does not hold the cluster's key")
    verdict = decode(sealed.body, HelloAnswer)
    if verdict.refused_field:
        raise HandshakeRefusedError(f"refused for {verdict.refused_field}: {verdict.reason}")
    return transport.codec != "" and verdict.codec == transport.codec


def examine(channel: Channel, ours: Identity, transport: Transport, deadline: float) -> Hello:
    """Run the receiver's side and return the caller's Hello. Raises HandshakeRefusedError."""
    try:
        spoken = channel.recv_frame(deadline)
        hello = decode(spoken, Hello)
        challenge = encode(Challenge(os.urandom(NONCE_BYTES)))
        channel.send_all(frame(challenge), deadline)
        proof = channel.recv(Proof, deadline)
    except (ConnectionError, TimeoutError, ProtocolError) as error:
        raise HandshakeRefusedError(f"no proof of the key: {error}") from error
    if not hmac.compare_digest(proof.mac, _digest(ours.key, b"sender", spoken, challenge)):
        raise HandshakeRefusedError(f"{hello.worker_id!r} does not hold the cluster's key")
    refused_field, reason = _mismatch(hello, ours, transport.name)
    answer = HelloAnswer(ours.worker_id, ours.incarnation, refused_field, reason[:512], transport.codec)
    body = encode(answer)
    channel.send(SealedAnswer(body, _digest(ours.key, b"receiver", spoken, challenge, body)), deadline)
    if refused_field:
        raise HandshakeRefusedError(f"refused {hello.worker_id!r} for {refused_field}: {reason}")
    return hello


def _mismatch(hello: Hello, ours: Identity, transport: str) -> tuple[str, str]:
    """Return the first field of the Hello that differs from ours, and the reason; or two empty strings."""
    expected: dict[str, tuple[object, str]] = {
        "version": (WIRE_VERSION, ""),
        "transport": (transport, ""),
        "receiver_incarnation": (ours.incarnation, "stale, "),
    }
    for field, (here, remark) in expected.items():
        there = getattr(hello, field)
        if there != here:
            return field, f"{remark}the sender says {there!r:.200}, here it is {here!r:.200}"
    problem = conversion_problem(hello.wire, ours.pool.segments)
    return problem or _contradiction(hello, ours.pool) or ("", "")


def _contradiction(hello: Hello, pool: RegisteredPool) -> tuple[str, str] | None:
    """Return a contradiction within the Hello: its segments imply its wire format and block size."""
    expected = pool.block_bytes
    if not hello.segments == hello.wire == list(pool.segments):
        quantization = hello.wire[0].quantization if hello.wire else ""
        wire_dtype = "auto" if hello.wire == hello.segments else quantization
        try:
            if list(wire_segments(hello.segments, wire_dtype)) != hello.wire:
                return "wire", "it is not what the segments look like on any wire"
            expected = block_bytes(hello.segments)
        except LayoutError as error:
            return "segments", str(error)
    if hello.block_bytes != expected:
        return "block_bytes", f"the sender says {hello.block_bytes}, but its segments take {expected}"
    return None
