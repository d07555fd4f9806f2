"""Every message that travels between the router and the workers, and between workers.

All are msgspec structs in tagged msgpack. Field bounds are part of the types, so that a decoded message can
be used without further checks of its shape. What decode workers and draft workers tell each other is in
`protocol.draft_messages`.
"""

from __future__ import annotations

from math import inf
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from protocol.bounded import BlockHash, Count, Id, Seconds, ShortText, TokenIds
from protocol.costs import StepCosts
from protocol.draft_messages import DraftFor, Drafts
from protocol.handoff import MAX_HANDOFF_S, Extents, HandoffManifest, SegmentInfo
from protocol.kv_events import CacheFormat, KvChange
from protocol.sampling import SamplingParams
from protocol.speculation import MAX_TREE_NODES, Method, RequestSpeculation, SpeculationState
from protocol.version import PROTOCOL, version

Role = Annotated[str, Meta(min_length=1, max_length=64)]
"""A role's name in `protocol.roles.ROLES`."""
FinishReason = Literal["stop", "length", "abort", "error"]
ErrorKind = Literal["invalid", "overloaded", "timeout", "worker_lost", "transfer", "internal"]


class TransferOffer(msgspec.Struct, frozen=True, kw_only=True):
    """One way to reach a worker's KV pool: the transport's name and what it needs to connect."""

    transport: Id
    host_id: Id
    address: ShortText
    same_host: bool = False
    """Whether only peers on this host can use it."""


class PeerAddress(msgspec.Struct, frozen=True, kw_only=True):
    """How another worker reaches this one."""

    worker_id: Id
    incarnation: Id
    control: ShortText
    offers: Annotated[list[TransferOffer], Meta(max_length=16)] = []


class DraftPlan(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Where a request's drafts are made, and the most tokens of one. Without a method nobody drafts.

    Without `at` the worker that decodes the request drafts too, else that draft worker does.
    """

    method: Method | None = None
    max_tokens: Annotated[int, Meta(ge=0, le=MAX_TREE_NODES)] = MAX_TREE_NODES
    at: PeerAddress | None = None


class EngineRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One sequence to generate. `output_token_ids` were emitted before, by a worker that is gone.

    Without a `draft_plan` the worker that decodes it drafts as the deployment and the request say. Beside it
    steps that compute prompts keep `slo_tpot_s`, the time per output token that its client asks for.
    """

    request_id: Id
    prompt_token_ids: TokenIds
    sampling: SamplingParams
    output_token_ids: TokenIds = []
    priority: Annotated[int, Meta(ge=-(2**31), lt=2**31)] = 0
    timeout_s: Seconds = 600.0
    slo_tpot_s: Annotated[float, Meta(gt=0)] = inf
    cache_salt: Annotated[str, Meta(max_length=256)] = ""
    speculation: RequestSpeculation | None = None
    draft_plan: DraftPlan | None = None


# --- router -> worker -------------------------------------------------------------------------------


class Registered(msgspec.Struct, frozen=True, kw_only=True, tag="registered"):
    """The router, itself of the incarnation `router`, knows this one of the worker from now on.

    `protocol` is what it speaks, and `release` its Tandem's version.
    """

    incarnation: Id
    router: Id
    protocol: Count = PROTOCOL
    release: ShortText = msgspec.field(default_factory=version)


class Refused(msgspec.Struct, frozen=True, kw_only=True, tag="refused"):
    """The router does not take this incarnation of the worker, and never will."""

    incarnation: Id
    reason: ShortText


class Unregistered(msgspec.Struct, frozen=True, kw_only=True, tag="unregistered"):
    """The router hears from this incarnation and does not know it. Answered by `Register`."""

    incarnation: Id


class Generate(msgspec.Struct, frozen=True, kw_only=True, tag="generate"):
    """Run a request. With `decode`, prefill it and hand it over there; without, run all of it here.

    `prefix` is a worker that may hold more of the prompt's KV than this one: to be asked for it first.
    """

    incarnation: Id
    request: EngineRequest
    decode: PeerAddress | None = None
    prefix: PeerAddress | None = None


class Peers(msgspec.Struct, frozen=True, kw_only=True, tag="peers"):
    """Workers that this one will hand prompts over to: a good time to connect is now."""

    peers: Annotated[list[PeerAddress], Meta(max_length=2**12)]


class Abort(msgspec.Struct, frozen=True, kw_only=True, tag="abort"):
    """Forget these requests, whatever their stage. Unknown ids are ignored; no answer is sent."""

    request_ids: Annotated[list[Id], Meta(max_length=2**16)]


class CallRoll(msgspec.Struct, frozen=True, kw_only=True, tag="call_roll"):
    """Say by `Absent` which of these requests, all sent before, are not under way here."""

    incarnation: Id
    request_ids: Annotated[list[Id], Meta(max_length=2**16)]


class Prefetch(msgspec.Struct, frozen=True, kw_only=True, tag="prefetch"):
    """Bring the KV of a request, which `prefix` runs, into the prefix cache. Answered by `Prefetched`."""

    incarnation: Id
    request: EngineRequest
    prefix: PeerAddress


class PrepareToLeave(msgspec.Struct, frozen=True, kw_only=True, tag="prepare_to_leave"):
    """The worker is to end, or to go on in another role as a new incarnation, once nothing runs on it.

    It says so to all its routers by `Leaving`.
    """

    incarnation: Id
    role: Role | None = None
    next_incarnation: Id | None = None


class Leave(msgspec.Struct, frozen=True, kw_only=True, tag="leave"):
    """The router has nothing on the worker any more, which leaves when all routers have said so."""

    incarnation: Id


class Redirect(msgspec.Struct, frozen=True, kw_only=True, tag="redirect"):
    """Hand the request over to `decode` instead; None: nobody takes it, decode it where its prompt is."""

    incarnation: Id
    request_id: Id
    decode: PeerAddress | None = None


class Replan(msgspec.Struct, frozen=True, kw_only=True, tag="replan"):
    """From now on the request's drafts are made as `plan` says; None: as the worker decides."""

    incarnation: Id
    request_id: Id
    plan: DraftPlan | None = None


class PeerGone(msgspec.Struct, frozen=True, kw_only=True, tag="peer_gone"):
    """Free what is held for the incarnation `gone` of a worker, which is lost. If it speaks again, it begins
    anew.
    """

    incarnation: Id
    worker_id: Id
    gone: Id


class ReplayKvEvents(msgspec.Struct, frozen=True, kw_only=True, tag="replay_kv_events"):
    """Send the batches of KV events again, from number `first` on, or all that is held if that is too old."""

    incarnation: Id
    first: Count


# --- worker -> router -------------------------------------------------------------------------------


class PairState(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What went between a worker and one peer over one transport, and whether that transport serves the pair.

    `refused` is the kind of reason why not, `reason` the reason in words. Without a peer the transport serves
    nobody; without a transport the counters are those of the pair as a whole. A piece takes `latency_s`, and
    its bytes move at `bytes_per_s`, both measured; 0 bytes a second: not yet.
    """

    peer: Annotated[str, Meta(max_length=128)]
    transport: Annotated[str, Meta(max_length=128)]
    in_use: bool = False
    refused: Annotated[str, Meta(max_length=32)] = ""
    reason: Annotated[str, Meta(max_length=512)] = ""
    latency_s: Seconds = 0.0
    bytes_per_s: Annotated[float, Meta(ge=0)] = 0.0
    counters: dict[Id, float] = {}


class WorkerState(msgspec.Struct, frozen=True, kw_only=True, tag="state"):
    """A worker's load, and what its steps cost.

    Sent at a steady pace, from a thread of its own, so it doubles as the heartbeat. Counters are totals since
    the incarnation began.
    """

    worker_id: Id
    incarnation: Id
    role: Role
    num_running: Count = 0
    num_waiting: Count = 0
    waiting_tokens: Count = 0
    total_blocks: Count = 0
    free_blocks: Count = 0
    cached_blocks: Count = 0
    num_preemptions: Count = 0
    prefix_query_tokens: Count = 0
    prefix_hit_tokens: Count = 0
    steps: Count = 0
    num_kv_events: Count = 0
    """Batches of `KvEvents` sent."""
    counters: dict[Id, float] = {}
    transports: dict[Id, Id] = {}
    pairs: Annotated[list[PairState], Meta(max_length=4096)] = []
    speculation: SpeculationState | None = None
    costs: StepCosts = StepCosts()

    @property
    def kv_usage(self) -> float:
        """Share of the KV pool that requests hold."""
        free = self.free_blocks + self.cached_blocks
        return 1 - free / self.total_blocks if self.total_blocks else 0.0


class Register(msgspec.Struct, frozen=True, kw_only=True, tag="register"):
    """A worker is ready to serve, as process `pid` on the machine named `host`.

    `weights` tells those of its model from others, `cache` how it identifies blocks; without a prefix cache
    there is none. `protocol` and `release` are
    as in `Registered`.
    """

    address: PeerAddress
    host: ShortText = ""
    pid: Count = 0
    role: Role
    model: ShortText
    weights: ShortText = ""
    max_model_len: Count
    vocab_size: Count
    eos_token_ids: TokenIds
    state: WorkerState
    cache: CacheFormat | None = None
    start_up: dict[Id, ShortText] = {}
    protocol: Count = PROTOCOL
    release: ShortText = msgspec.field(default_factory=version)


class Introduced(msgspec.Struct, frozen=True, tag="register"):
    """A `Register` of any protocol, as far as all of them agree."""

    address: PeerAddress
    protocol: Count = 0
    release: ShortText = ""


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log-probabilities at one position: the token's own and rank, then the likeliest, best first."""

    logprob: float
    rank: int
    top_token_ids: list[int] = []
    top_logprobs: list[float] = []


class TransferTiming(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A prompt's way from its prefill worker to its decode worker, in seconds and bytes.

    reserve_s: from asking the decode worker for blocks to having them. transfer_s: from the first push until
    all blocks were in place; exposed_s of it after the prompt was computed. wait_s: pieces waited for their
    turn on the wire, summed. handoff_s: from the last block's arrival to the first decode step. Nothing is
    pushed if the decode worker has all blocks: then there is no transport, and handoff_s counts from the
    manifest.
    """

    transport: Annotated[str, Meta(max_length=128)] = ""
    transferred_bytes: Count = 0
    reserve_s: Seconds = 0.0
    transfer_s: Seconds = 0.0
    exposed_s: Seconds = 0.0
    wait_s: Seconds = 0.0
    handoff_s: Seconds = 0.0


class RequestTiming(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Where a request's time went on one worker, in seconds.

    `transfer` comes with the first token of a decode worker that took the request over, and `decode_queue_s`:
    how long that had all of it before its first step began.
    """

    queue_s: Seconds = 0.0
    prefill_s: Seconds = 0.0
    decode_queue_s: Seconds = 0.0
    transfer: TransferTiming | None = None


class TokenOutput(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What one step made for one request.

    `position` tokens of the answer come before its own. `cached_tokens` comes with a sequence's first token.
    Of the `drafted_tokens` that the step verified `accepted_tokens` are among its tokens.
    """

    request_id: Id
    token_ids: TokenIds
    position: Count = 0
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    cached_tokens: int | None = None
    timing: RequestTiming | None = None
    drafted_tokens: Count = 0
    accepted_tokens: Count = 0
    error_kind: ErrorKind | None = None
    error: ShortText | None = None


class StepOutput(msgspec.Struct, frozen=True, kw_only=True, tag="step"):
    """Everything that one engine step made for the requests of one router."""

    worker_id: Id
    incarnation: Id
    outputs: list[TokenOutput]


class KvEvents(msgspec.Struct, frozen=True, kw_only=True, tag="kv_events"):
    """What changed in a worker's prefix cache, in this order. Its batches are numbered from 0.

    One that begins with "cleared" needs none of those before it.
    """

    worker_id: Id
    incarnation: Id
    sequence: Count
    changes: Annotated[list[KvChange], Meta(max_length=2**16)]


class HandoverFailed(msgspec.Struct, frozen=True, kw_only=True, tag="handover_failed"):
    """A decode worker did not take a request over.

    What is computed of the prompt stays with the prefill worker, which goes on and waits for a `Redirect` or
    an `Abort`. With `manifest_sent` the decode worker may have begun to run the request before it was told
    to give it up.
    """

    worker_id: Id
    incarnation: Id
    request_id: Id
    decode_incarnation: Id
    error_kind: ErrorKind
    reason: ShortText
    manifest_sent: bool = False


class Absent(msgspec.Struct, frozen=True, kw_only=True, tag="absent"):
    """These of a `CallRoll` are not under way here. All that was to be said of them was said before."""

    worker_id: Id
    incarnation: Id
    request_ids: Annotated[list[Id], Meta(max_length=2**16)]


class Prefetched(msgspec.Struct, frozen=True, kw_only=True, tag="prefetched"):
    """A `Prefetch` is over; `complete`: all full blocks that the request had are in the prefix cache."""

    worker_id: Id
    incarnation: Id
    request_id: Id
    complete: bool


class Leaving(msgspec.Struct, frozen=True, kw_only=True, tag="leaving"):
    """The worker was told to end, or to go on in another role. The router takes its requests elsewhere, then
    answers `Leave`.
    """

    worker_id: Id
    incarnation: Id
    role: Role | None = None
    next_incarnation: Id | None = None


# --- worker -> worker that is asked for something: a decode worker, or the holder of a prefix --------


class Reserve(msgspec.Struct, frozen=True, kw_only=True, tag="reserve"):
    """Ask the decode worker for blocks. `ttl_s`: the lease's life without progress.

    `segments` are those of the prefill worker's pool, `wire_dtype` is how the wire will carry their values.
    """

    incarnation: Id
    request: EngineRequest
    prefill_worker: Id
    prefill_incarnation: Id
    segments: Annotated[list[SegmentInfo], Meta(max_length=8)]
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


# --- and its answers --------------------------------------------------------------------------------


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
    """The blocks of a `Fetch` are on their way. The leading `num_drafted` of them hold the draft's KV too."""

    request_id: Id
    lease_id: Id
    num_drafted: Count


class FetchRefused(msgspec.Struct, frozen=True, kw_only=True, tag="fetch_refused"):
    request_id: Id
    lease_id: Id
    reason: ShortText


class Stale(msgspec.Struct, frozen=True, kw_only=True, tag="stale"):
    """The message was for another incarnation of this worker; nothing was changed."""

    request_id: Id
    incarnation: Id


RouterToWorker = (
    Registered
    | Refused
    | Unregistered
    | Generate
    | Peers
    | Abort
    | CallRoll
    | Redirect
    | Replan
    | PeerGone
    | ReplayKvEvents
    | Prefetch
    | PrepareToLeave
    | Leave
)
WorkerToRouter = (
    Register | WorkerState | StepOutput | KvEvents | HandoverFailed | Absent | Prefetched | Leaving
)
PeerRequest = Reserve | Handoff | Release | Fetch | DraftFor
PeerReply = Reserved | ReserveRefused | HandoffAck | Lent | FetchRefused | Drafts | Stale
