"""What the launcher and a router's process say to each other, over a local socket."""

from __future__ import annotations

import msgspec

from messaging.sockets import ClusterKeys
from protocol.config import ServeConfig
from router.server import RouterPlace

MAX_MESSAGE_BYTES = 1024 * 1024


class StartRouter(msgspec.Struct, frozen=True, tag="start"):
    """The first message."""

    config: ServeConfig
    keys: ClusterKeys
    link_host: str
    place: RouterPlace


class WorkerDied(msgspec.Struct, frozen=True, tag="died"):
    worker_id: str
    incarnation: str
    reason: str


class Expect(msgspec.Struct, frozen=True, tag="expect"):
    """These workers are kept running, so requests may wait for them."""

    worker_ids: list[str]


class LetGo(msgspec.Struct, frozen=True, tag="let_go"):
    """Answers `Leaves`: the worker may, or why not."""

    worker_id: str
    refusal: str


class StopRouter(msgspec.Struct, frozen=True, tag="stop"):
    """Drain and end. A second one does not wait for running requests."""


ToRouter = StartRouter | WorkerDied | Expect | LetGo | StopRouter


class KnownWorker(msgspec.Struct, frozen=True):
    incarnation: str
    silence_s: float
    start_up: dict[str, str]


class Report(msgspec.Struct, frozen=True, tag="report"):
    """The router runs, and knows these workers by their ids. Sent a few times a second."""

    workers: dict[str, KnownWorker]


class Leaves(msgspec.Struct, frozen=True, tag="leaves"):
    """The worker is to be drained, for good or to change its role. Answered by `LetGo`."""

    worker_id: str
    for_good: bool


class Renews(msgspec.Struct, frozen=True, tag="renews"):
    """The worker goes on in another role."""

    worker_id: str
    role: str
    incarnation: str


class CannotStart(msgspec.Struct, frozen=True, tag="cannot_start"):
    reason: str


FromRouter = Report | Leaves | Renews | CannotStart
