"""Messages between workers: reservations and hand-offs, prefixes, and drafts."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from protocol.handoff import MAX_HANDOFF_S, MAX_SEGMENTS, Extents, HandoffManifest, SegmentInfo
from protocol.ids import BlockHash, Count, Id, PeerAddress, ShortText, TokenId
from protocol.outputs import ErrorKind
from protocol.requests import EngineRequest
from protocol.sampling import SamplingParams
from protocol.speculation import MAX_TREE_NODES

MAX_UPDATE_TOKENS = 2**14
"""Most tokens in one `DraftUpdate`. Longer texts come in several messages."""
MAX_DRAFT_REQUESTS = 4096
"""Most requests of each kind in one message."""
DRAFT_LEASE_S = 30.0
"""Seconds for which a draft worker keeps a request after its latest update, since the decode worker may be
gone and the router's message about this lost. If it is not gone, its next update opens the request again.
"""


class DraftOpening(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The sampling parameters of a request, and the number of its first tokens that are the prompt."""

    sampling: SamplingParams
    num_prompt: Annotated[int, Meta(ge=1, lt=2**31)]
    cache_salt: Annotated[str, Meta(max_length=256)] = ""


class DraftUpdate(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The tokens that a request's target has committed from position `start` on, and how many draft tokens it
    can use.

    Each time a decode worker opens the request again, `epoch` is higher. `opening` comes with the first
    tokens. While the decode worker can use no drafts, more committed tokens may follow.
    """

    request_id: Id
    epoch: Count
    start: Count
    token_ids: Annotated[list[TokenId], Meta(max_length=MAX_UPDATE_TOKENS)] = []
    num_wanted: Annotated[int, Meta(ge=0, le=2 * MAX_TREE_NODES + 1)] = 0
    opening: DraftOpening | None = None


class DraftKey(msgspec.Struct, frozen=True, array_like=True):
    """The key of a request in one epoch."""

    request_id: Id
    epoch: Count


class DraftFor(msgspec.Struct, frozen=True, kw_only=True, tag="draft_for"):
    """Updates of the requests that a decode worker wants drafts for, and the ids of requests that no longer
    need drafts.

    Each message has a higher `number` than earlier ones, and is answered after at most one step. A message
    that arrives after a later one is ignored. Ended requests are repeated until a message with them is
    answered.
    """

    incarnation: Id
    number: Count
    given: Annotated[list[DraftUpdate], Meta(max_length=MAX_DRAFT_REQUESTS)] = []
    ended: Annotated[list[DraftKey], Meta(max_length=MAX_DRAFT_REQUESTS)] = []


class DraftedChain(msgspec.Struct, frozen=True, array_like=True):
    """A request's draft: all known tokens from position `start` on."""

    request_id: Id
    epoch: Count
    start: Count
    token_ids: Annotated[list[TokenId], Meta(max_length=2 * MAX_TREE_NODES + 1)]


class MissingTokens(msgspec.Struct, frozen=True, array_like=True):
    """The draft worker lacks the committed tokens from position `num_tokens` on; 0: it has no tokens."""

    request_id: Id
    epoch: Count
    num_tokens: Count


class Drafts(msgspec.Struct, frozen=True, kw_only=True, tag="drafts"):
    """A draft worker's drafts after message `number`. It will not draft for the `refused` requests."""

    incarnation: Id
    number: Count
    chains: Annotated[list[DraftedChain], Meta(max_length=MAX_DRAFT_REQUESTS)] = []
    behind: Annotated[list[MissingTokens], Meta(max_length=MAX_DRAFT_REQUESTS)] = []
    refused: Annotated[list[DraftKey], Meta(max_length=MAX_DRAFT_REQUESTS)] = []


class Reserve(msgspec.Struct, frozen=True, kw_only=True, tag="reserve"):
    """Ask the decode worker for blocks. `ttl_s`: the lease's life without progress.

    `segments`: of the prefill worker's pool. `wire_dtype`: the dtype of values on the wire.
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
"""In a `Release`: any lease of this prefill worker for the request, or its place in the queue."""


class Release(msgspec.Struct, frozen=True, kw_only=True, tag="release"):
    """Give up the lease. Idempotent."""

    incarnation: Id
    lease_id: Id
    request_id: Id


class Fetch(msgspec.Struct, frozen=True, kw_only=True, tag="fetch"):
    """Push the cached blocks among `identities`, consecutive from a prompt's block `first_block` on.

    They go to `receiver`, under its lease. The lease's final piece means that the holder has no more.
    """

    incarnation: Id
    request_id: Id
    lease_id: Id
    first_block: Annotated[int, Meta(ge=0, lt=2**30)]
    identities: Annotated[list[BlockHash], Meta(min_length=1, max_length=2**20)]
    receiver: PeerAddress


class Reserved(msgspec.Struct, frozen=True, kw_only=True, tag="reserved"):
    """A request's reserved blocks on the decode worker, of `block_size` tokens.

    Blocks before `covered` are already there. `num_running` requests decode there.
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
    """The decode worker has taken the request over, or refuses it and names the manifest's bad `field`."""

    request_id: Id
    lease_id: Id
    error: ShortText | None = None
    field: Annotated[str, Meta(max_length=128)] | None = None


class FetchGranted(msgspec.Struct, frozen=True, kw_only=True, tag="lent"):
    """The first `num_found` blocks come, except those before a window; `num_drafted` have the draft's KV."""

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


PeerReply = Reserved | ReserveRefused | HandoffAck | FetchGranted | FetchRefused | Drafts | Stale
