"""What a worker asks of another one, a decode worker or the holder of a prefix, and the answers.

What decode workers and draft workers tell each other of drafts is in `protocol.draft_messages`.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from protocol.bounded import BlockHash, Count, Id, ShortText
from protocol.draft_messages import DraftFor, Drafts
from protocol.handoff import MAX_HANDOFF_S, MAX_SEGMENTS, Extents, HandoffManifest, SegmentInfo
from protocol.outputs import ErrorKind
from protocol.peers import PeerAddress
from protocol.requests import EngineRequest


class Reserve(msgspec.Struct, frozen=True, kw_only=True, tag="reserve"):
    """Ask the decode worker for blocks. `ttl_s`: the lease's life without progress.

    `segments` are those of the prefill worker's pool, `wire_dtype` is how the wire will carry their values.
    """

    incarnation: Id
    request: EngineRequest
    prefill_worker: Id
    prefill_incarnation: Id
    segments: Annotated[list[SegmentInfo], Meta(max_length=MAX_SEGMENTS)]
    ttl_s: Annotated[float, Meta(ge=0, le=MAX_HANDOFF_S)]
    wire_dtype: Annotated[str, Meta(max_length=32)] = "auto"


class Handoff(msgspec.Struct, frozen=True, kw_only=True, tag="handoff"):
    """All blocks are on their way; here is what they are."""

    manifest: HandoffManifest


ANY_LEASE = "*"
"""In a `Release`: whatever lease this prefill worker has for the request, or its place in the queue."""


class Release(msgspec.Struct, frozen=True, kw_only=True, tag="release"):
    """The lease is not wanted any more. Idempotent."""

    incarnation: Id
    lease_id: Id
    request_id: Id


class Fetch(msgspec.Struct, frozen=True, kw_only=True, tag="fetch"):
    """Push what is cached of these blocks, which follow each other from position `first_block` of a prompt.

    They go to `receiver`, under its lease; with the lease's final piece the holder says that it has no more.
    """

    incarnation: Id
    request_id: Id
    lease_id: Id
    first_block: Annotated[int, Meta(ge=0, lt=2**30)]
    identities: Annotated[list[BlockHash], Meta(min_length=1, max_length=2**20)]
    receiver: PeerAddress


class Reserved(msgspec.Struct, frozen=True, kw_only=True, tag="reserved"):
    """A request's blocks on the decode worker, of `block_size` tokens; those before `covered` are there.

    `num_running` requests are decoded there.
    """

    request_id: Id
    lease_id: Id
    incarnation: Id
    block_size: Annotated[int, Meta(ge=1, le=2**16)]
    extents: Extents
    covered: Count
    num_running: Count = 0


class ReserveRefused(msgspec.Struct, frozen=True, kw_only=True, tag="reserve_refused"):
    request_id: Id
    error_kind: ErrorKind
    reason: ShortText


class HandoffAck(msgspec.Struct, frozen=True, kw_only=True, tag="handoff_ack"):
    """The decode worker has taken the request over, or says why not (`field` of the manifest, if one)."""

    request_id: Id
    lease_id: Id
    error: ShortText | None = None
    field: Annotated[str, Meta(max_length=128)] | None = None


class Lent(msgspec.Struct, frozen=True, kw_only=True, tag="lent"):
    """The first `num_found` blocks of a `Fetch` are on their way, but for those that lie behind a window. The
    leading `num_drafted` of them hold the draft's KV too.
    """

    request_id: Id
    lease_id: Id
    num_drafted: Count
    num_found: Count


class FetchRefused(msgspec.Struct, frozen=True, kw_only=True, tag="fetch_refused"):
    request_id: Id
    lease_id: Id
    reason: ShortText


class Stale(msgspec.Struct, frozen=True, kw_only=True, tag="stale"):
    """The message was for another incarnation of this worker; nothing was changed."""

    request_id: Id
    incarnation: Id


PeerRequest = Reserve | Handoff | Release | Fetch | DraftFor


PeerReply = Reserved | ReserveRefused | HandoffAck | Lent | FetchRefused | Drafts | Stale
