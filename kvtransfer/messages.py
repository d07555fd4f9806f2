"""Messages of a data connection. Every field is bounded by its type."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from kvtransfer.blocks.extents import MAX_PIECE_BLOCKS, PARTS_AT_ONCE, RUN_BYTES
from protocol.errors import ProtocolError
from protocol.handoff import MAX_SEGMENTS, BlockPoolIndex, SegmentInfo
from protocol.ids import Id

WIRE_VERSION = 6
NONCE_BYTES = 32

GOOD, SPOILED = b"good", b"void"
"""The trailer after a piece's blocks. Spoiled: the sender aborted midway and padded the rest.

Anything else means that bytes were lost or duplicated, so that the rest of the stream is unreadable.
"""

UNKNOWN_LEASE = "unknown lease"
OTHER_SENDER = "the lease belongs to another sender"
OUTSIDE = "blocks outside of the lease"
UNKNOWN_BLOCK_POOL = "a block pool that the lease does not have"
GIVEN_UP = "given up by the sender"
STILL_WRITTEN = "an earlier attempt at the piece is still writing"
OVERTAKEN = "a later attempt at the piece has begun"
CHECKSUM_MISMATCH = "checksum mismatch"
OUT_OF_RANGE = "a value beyond the range of the pool's dtype"
NOT_QUANTIZABLE = "a value that can't be quantized"
REFUSALS = {
    UNKNOWN_LEASE: "unknown_lease",
    OTHER_SENDER: "other_sender",
    OUTSIDE: "outside_of_lease",
    UNKNOWN_BLOCK_POOL: "unknown_block_pool",
    GIVEN_UP: "given_up",
    STILL_WRITTEN: "still_written",
    OVERTAKEN: "overtaken",
    CHECKSUM_MISMATCH: "checksum_mismatch",
    OUT_OF_RANGE: "out_of_range",
    NOT_QUANTIZABLE: "not_quantizable",
}
"""The counter for each reason to refuse a piece."""
TRANSIENT = {STILL_WRITTEN, CHECKSUM_MISMATCH}
"""Refusals after which the piece may be sent once more."""


def failure_kind(refusal: str) -> str:
    """Return the counter for a refusal. Their number is bounded, whatever a peer answers."""
    return REFUSALS.get(refusal, "refused")


def error_kind(error: Exception) -> str:
    """Return the counter for a connection that ended by this error; `internal` is a bug of ours."""
    if isinstance(error, ProtocolError):
        return "malformed"
    if isinstance(error, TimeoutError):
        return "timeout"
    return "lost" if isinstance(error, OSError) else "internal"


Nonce = Annotated[bytes, Meta(min_length=NONCE_BYTES, max_length=NONCE_BYTES)]
Digest = Annotated[bytes, Meta(min_length=32, max_length=32)]
Reason = Annotated[str, Meta(max_length=512)]
Number = Annotated[int, Meta(ge=0, lt=2**62)]
Duration = Annotated[float, Meta(ge=0, le=1e9)]
Segments = Annotated[list[SegmentInfo], Meta(max_length=MAX_SEGMENTS)]


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """Sender to receiver: the ids of both, the content of the sender's pool, and its layout on the wire."""

    version: Number
    nonce: Nonce
    transport: Id
    worker_id: Id
    incarnation: Id
    receiver_incarnation: Id
    block_bytes: Number
    num_blocks: Number
    segments: Segments
    wire: Segments
    checksum: Literal["off", "sampled", "full"] = "off"


class Challenge(msgspec.Struct, frozen=True, tag="challenge"):
    nonce: Nonce


class Proof(msgspec.Struct, frozen=True, tag="proof"):
    """The sender's proof that it holds the key."""

    mac: Digest


class Answer(msgspec.Struct, frozen=True, tag="verdict"):
    """The receiver's answer: `refused_field` of the Hello with the reason, or empty for yes."""

    worker_id: Id
    incarnation: Id
    refused_field: Annotated[str, Meta(max_length=64)] = ""
    reason: Reason = ""


class SealedAnswer(msgspec.Struct, frozen=True, tag="sealed"):
    """An encoded Answer with the receiver's proof that it holds the key."""

    body: Annotated[bytes, Meta(max_length=4096)]
    mac: Digest


class Piece(msgspec.Struct, frozen=True, array_like=True):
    """Announces blocks of one lease and block pool, which follow.

    `runs` are encoded as in `extents`. They cover `num_parts` parts of a prompt, which `index` counts from
    0; parts keep their indices when they are sent again, possibly in other pieces. `final` is on the piece
    with the last part. `checksum` covers the bytes on the wire, in the mode that the Hello names. The piece
    was pushed `pushed_s` after the lease's first one, and waited `waited_s` before it was sent. It was sent
    `attempt` times before.
    """

    sequence: Number
    lease_id: Id
    index: Number
    num_parts: Annotated[int, Meta(ge=1, le=PARTS_AT_ONCE)]
    runs: Annotated[bytes, Meta(max_length=MAX_PIECE_BLOCKS * RUN_BYTES)]
    final: bool
    checksum: Annotated[bytes, Meta(min_length=8, max_length=8)] | None = None
    pushed_s: Duration = 0.0
    waited_s: Duration = 0.0
    attempt: Number = 0
    block_pool: BlockPoolIndex = 0

    @property
    def part_indices(self) -> range:
        return range(self.index, self.index + self.num_parts)


class Ack(msgspec.Struct, frozen=True, array_like=True):
    """The piece is in place, or not (`error`). With `again` it may be sent once more."""

    sequence: Number
    error: Reason = ""
    again: bool = False
