"""Messages to a decode worker, or to the holder of a prefix, and their answers."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from protocol.draft_messages import DraftFor, Drafts
from protocol.handoff import MAX_HANDOFF_S, MAX_SEGMENTS, Extents, HandoffManifest, SegmentInfo
from protocol.ids import BlockHash, Count, Id, PeerAddress, ShortText
from protocol.outputs import ErrorKind
from protocol.requests import EngineRequest


class Reserve(msgspec.Struct, frozen=True, kw_only=True, tag="reserve"):
    """Ask the decode worker for blocks. `ttl_s`: the lease's life without progress.

    `segments` are those of the prefill worker's pool; `wire_dtype` is the dtype of values on the wire.
    """

    incarnation: Id
    request: EngineRequest
    prefill_worker: Id
    prefill_incarnation: Id
    segments: Annotated[list[SegmentInfo], Meta(max_length=MAX_SEGMENTS)]
    ttl_s: Annotated[float, Meta(ge=0, le=MAX_HANDOFF_S)]
    wire_dtype: Annotated[str, Meta(max_length=32)] = "auto"


class Handoff(msgspec.Struct, frozen=True, kw_only=True, tag="handoff"):
    """The manifest of a prompt whose blocks are all on their way."""

    manifest: HandoffManifest


ANY_LEASE = "*"
"""In a `Release`: any lease that this prefill worker has for the request, or its place in the queue."""


class Release(msgspec.Struct, frozen=True, kw_only=True, tag="release"):
    """Give up the lease. Idempotent."""

    incarnation: Id
    lease_id: Id
    request_id: Id


class Fetch(msgspec.Struct, frozen=True, kw_only=True, tag="fetch"):
    """Push the cached ones of these consecutive blocks, which start at position `first_block` of a prompt.

    They go to `receiver`, under its lease; with the lease's last piece the holder says that it has no more.
    """

    incarnation: Id
    request_id: Id
    lease_id: Id
    first_block: Annotated[int, Meta(ge=0, lt=2**30)]
    identities: Annotated[list[BlockHash], Meta(min_length=1, max_length=2**20)]
    receiver: PeerAddress


class Reserved(msgspec.Struct, frozen=True, kw_only=True, tag="reserved"):
    """A request's reserved blocks on the decode worker, of `block_size` tokens; blocks before `covered` are
    already there.

    `num_running` requests decode there.
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
    """The decode worker has taken the request over, or refuses it (and the manifest's `field`)."""

    request_id: Id
    lease_id: Id
    error: ShortText | None = None
    field: Annotated[str, Meta(max_length=128)] | None = None


class Lent(msgspec.Struct, frozen=True, kw_only=True, tag="lent"):
    """The first `num_found` blocks, less those before a window, come; `num_drafted` have the draft's KV."""

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
