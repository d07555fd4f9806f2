"""Messages from the router to workers."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from protocol.ids import Count, Id, PeerAddress, ShortText
from protocol.requests import AdapterName, AdapterPath, DraftPlan, EngineRequest
from protocol.roles import Role
from protocol.version import PROTOCOL, version


class Registered(msgspec.Struct, frozen=True, kw_only=True, tag="registered"):
    """The router with the incarnation `router` now knows this incarnation of the worker.

    `protocol` is the router's protocol version, `release` its Tandem version.
    """

    incarnation: Id
    router: Id
    protocol: Count = PROTOCOL
    release: ShortText = msgspec.field(default_factory=version)


class Refused(msgspec.Struct, frozen=True, kw_only=True, tag="refused"):
    """The router refuses this incarnation of the worker for good."""

    incarnation: Id
    reason: ShortText


class Unregistered(msgspec.Struct, frozen=True, kw_only=True, tag="unregistered"):
    """The sender of a message is an incarnation that the router does not know. Answer by `Register`."""

    incarnation: Id


class Generate(msgspec.Struct, frozen=True, kw_only=True, tag="generate"):
    """Run a request. With `decode`, prefill it and hand it over to that worker; without, run it here.

    `prefix` is a worker that may hold more of the prompt's KV: fetch that first.
    """

    incarnation: Id
    request: EngineRequest
    decode: PeerAddress | None = None
    prefix: PeerAddress | None = None


class Peers(msgspec.Struct, frozen=True, kw_only=True, tag="peers"):
    """The workers that this one will hand prompts over to. It connects to them now."""

    peers: Annotated[list[PeerAddress], Meta(max_length=2**12)]


class Abort(msgspec.Struct, frozen=True, kw_only=True, tag="abort"):
    """Drop these requests, in any stage. Ignore unknown ids; send no answer."""

    request_ids: Annotated[list[Id], Meta(max_length=2**16)]


class CallRoll(msgspec.Struct, frozen=True, kw_only=True, tag="call_roll"):
    """Report by `AbsentRequests` which of these requests, all sent earlier, are not running here."""

    incarnation: Id
    request_ids: Annotated[list[Id], Meta(max_length=2**16)]


class Redirect(msgspec.Struct, frozen=True, kw_only=True, tag="redirect"):
    """Hand the request over to `decode` instead. If None, decode it on the worker that prefilled it."""

    incarnation: Id
    request_id: Id
    decode: PeerAddress | None = None


class Replan(msgspec.Struct, frozen=True, kw_only=True, tag="replan"):
    """Draft for the request as `plan` says from now on; None: as the worker decides."""

    incarnation: Id
    request_id: Id
    plan: DraftPlan | None = None


class PeerGone(msgspec.Struct, frozen=True, kw_only=True, tag="peer_gone"):
    """Free everything held for the lost incarnation `gone` of a worker."""

    incarnation: Id
    worker_id: Id
    gone: Id


class ReplayKvEvents(msgspec.Struct, frozen=True, kw_only=True, tag="replay_kv_events"):
    """Send the KV event batches from number `first` on again, or the whole cache if some were dropped."""

    incarnation: Id
    first: Count


class Prefetch(msgspec.Struct, frozen=True, kw_only=True, tag="prefetch"):
    """Bring the KV of a request that `prefix` runs into the prefix cache. Answer by `Prefetched`."""

    incarnation: Id
    request: EngineRequest
    prefix: PeerAddress


class PrepareToLeave(msgspec.Struct, frozen=True, kw_only=True, tag="prepare_to_leave"):
    """Tell all routers that the worker leaves. Once nothing runs on it, end, or continue in another role."""

    incarnation: Id
    role: Role | None = None
    next_incarnation: Id | None = None


class Leave(msgspec.Struct, frozen=True, kw_only=True, tag="leave"):
    """The router is done with the worker, which leaves once all routers have sent this."""

    incarnation: Id


class LoadAdapter(msgspec.Struct, frozen=True, kw_only=True, tag="load_adapter"):
    """Load the folder's adapter, with this `digest` if given, under this name. Answer by `AdapterLoaded`."""

    incarnation: Id
    name: AdapterName
    path: AdapterPath
    digest: Annotated[str, Meta(max_length=32)] = ""


class UnloadAdapter(msgspec.Struct, frozen=True, kw_only=True, tag="unload_adapter"):
    """Drop the adapter of this name once no request here uses it. Ignore unknown names."""

    incarnation: Id
    name: AdapterName


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
    | LoadAdapter
    | UnloadAdapter
)
