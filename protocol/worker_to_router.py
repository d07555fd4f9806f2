"""Messages from workers to the router."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from protocol.costs import StepCosts
from protocol.ids import Count, Id, PeerAddress, Seconds, ShortText, TokenIds
from protocol.kv_events import CacheFormat, KvChange
from protocol.outputs import ErrorKind, TokenOutput
from protocol.requests import MAX_ADAPTERS, Adapter, AdapterName
from protocol.roles import Role
from protocol.speculation import SpeculationState
from protocol.version import PROTOCOL, version

HEARTBEAT_INTERVAL_S = 0.25
"""An eighth of the default `--worker-timeout`, so that a few late heartbeats lose no worker."""


class PairState(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Transfers between a worker and one peer over one transport, and whether that transport serves the pair.

    If not, `refused` is the kind of reason, `reason` the reason in words. Without a peer, the transport
    serves no peer; without a transport, the counters are of the whole pair. A piece takes `latency_s`, and
    its bytes move at `bytes_per_s`, both measured; 0 bytes a second: not measured yet.
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
    """A worker's load and the cost of its steps: the heartbeat, sent at a steady pace from its own thread.

    `stalled_s` is the time for which the worker's loop has been stuck. Counters are totals since the
    incarnation began.
    """

    worker_id: Id
    incarnation: Id
    role: Role
    stalled_s: Seconds = 0.0
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
    """Number of `KvEvents` batches sent so far."""
    counters: dict[Id, float] = {}
    transports: dict[Id, Id] = {}
    pairs: Annotated[list[PairState], Meta(max_length=4096)] = []
    speculation: SpeculationState | None = None
    costs: StepCosts = StepCosts()

    @property
    def kv_usage(self) -> float:
        """The share of the KV pool that requests hold."""
        free = self.free_blocks + self.cached_blocks
        return 1 - free / self.total_blocks if self.total_blocks else 0.0


class Register(msgspec.Struct, frozen=True, kw_only=True, tag="register"):
    """A worker is ready to serve, as process `pid` on the machine named `host`.

    `weights` identifies its model's weights. `cache` describes its block identities; None without a prefix
    cache. `protocol` and `release` are as in `Registered`.
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
    adapters: Annotated[list[Adapter], Meta(max_length=MAX_ADAPTERS)] = []
    start_up: dict[Id, ShortText] = {}
    protocol: Count = PROTOCOL
    release: ShortText = msgspec.field(default_factory=version)


class RegisterHeader(msgspec.Struct, frozen=True, tag="register"):
    """The part of a `Register` that all protocol versions share."""

    address: PeerAddress
    protocol: Count = 0
    release: ShortText = ""


class StepOutput(msgspec.Struct, frozen=True, kw_only=True, tag="step"):
    """The results of one engine step for the requests of one router."""

    worker_id: Id
    incarnation: Id
    outputs: list[TokenOutput]


class KvEvents(msgspec.Struct, frozen=True, kw_only=True, tag="kv_events"):
    """Numbered changes of a worker's prefix cache, in order. "cleared" makes earlier batches needless."""

    worker_id: Id
    incarnation: Id
    sequence: Count
    changes: Annotated[list[KvChange], Meta(max_length=2**16)]


class HandoverFailed(msgspec.Struct, frozen=True, kw_only=True, tag="handover_failed"):
    """A decode worker did not take a request over.

    The prefill worker keeps the computed KV and waits for a `Redirect` or an `Abort`. With `manifest_sent`
    the decode worker may have begun to run the request before it was told to give it up.
    """

    worker_id: Id
    incarnation: Id
    request_id: Id
    decode_incarnation: Id
    error_kind: ErrorKind
    reason: ShortText
    manifest_sent: bool = False


class AbsentRequests(msgspec.Struct, frozen=True, kw_only=True, tag="absent"):
    """The requests of a `CallRoll` that are not running here. All their outputs were sent earlier."""

    worker_id: Id
    incarnation: Id
    request_ids: Annotated[list[Id], Meta(max_length=2**16)]


class Prefetched(msgspec.Struct, frozen=True, kw_only=True, tag="prefetched"):
    """A `Prefetch` is over. `complete`: all full blocks of the request are in the prefix cache."""

    worker_id: Id
    incarnation: Id
    request_id: Id
    complete: bool


class AdapterLoaded(msgspec.Struct, frozen=True, kw_only=True, tag="adapter_loaded"):
    """A `LoadAdapter` succeeded, or failed with an `error` of this kind."""

    worker_id: Id
    incarnation: Id
    name: AdapterName
    digest: Annotated[str, Meta(max_length=32)] = ""
    error: ShortText = ""
    error_kind: ErrorKind = "invalid"


class Leaving(msgspec.Struct, frozen=True, kw_only=True, tag="leaving"):
    """The worker has to end or to change its role. The router moves its requests, then sends `Leave`."""

    worker_id: Id
    incarnation: Id
    role: Role | None = None
    next_incarnation: Id | None = None


WorkerToRouter = (
    Register
    | WorkerState
    | StepOutput
    | KvEvents
    | HandoverFailed
    | AbsentRequests
    | Prefetched
    | AdapterLoaded
    | Leaving
)
