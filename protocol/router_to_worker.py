"""What the router tells workers."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from protocol.adapters import AdapterName, AdapterPath
from protocol.bounded import Count, Id, ShortText
from protocol.peers import PeerAddress
from protocol.requests import DraftPlan, EngineRequest
from protocol.roles import Role
from protocol.version import PROTOCOL, version


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


class LoadAdapter(msgspec.Struct, frozen=True, kw_only=True, tag="load_adapter"):
    """Keep the adapter in this folder under this name. Answered by `AdapterLoaded`.

    With a `digest` it must be the one with that content.
    """

    incarnation: Id
    name: AdapterName
    path: AdapterPath
    digest: Annotated[str, Meta(max_length=32)] = ""


class UnloadAdapter(msgspec.Struct, frozen=True, kw_only=True, tag="unload_adapter"):
    """Forget the adapter of this name, once no request here has it. Unknown names are ignored."""

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
