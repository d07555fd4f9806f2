"""The messages between the launcher and routers in processes of their own."""

from __future__ import annotations

import msgspec

from messaging.sockets import ClusterKeys
from protocol.codec import BoundedDecoder
from protocol.config import ServeConfig
from protocol.requests import Adapter, AdapterName
from router.scaling.interface import Change, ScaleAnswer, ScaleRequest, ScalingEvent
from router.server import RouterPlace
from router.workers.assignment import RoleDemand

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
    """The workers kept running, by id, with their roles, and the `room` for further ones of each role."""

    roles: dict[str, str]
    room: dict[str, int]


class LetGo(msgspec.Struct, frozen=True, tag="let_go"):
    """Answers `Leaves`. `refusal` is empty if the worker may leave, else the reason why not."""

    worker_id: str
    refusal: str


class Scaled(msgspec.Struct, frozen=True, tag="scaled"):
    """Answers the `Scales` messages in their order."""

    answer: ScaleAnswer


class Begun(msgspec.Struct, frozen=True, tag="begun"):
    """Answers the `Begins` messages in their order. `refusal` is empty, or the reason why not."""

    refusal: str


class Lead(msgspec.Struct, frozen=True, tag="lead"):
    """Answers the `RouterReport` of the router that scales for all. `demand` is that of all other routers."""

    demand: dict[str, RoleDemand]


class Decided(msgspec.Struct, frozen=True, tag="decided"):
    """An event of autoscaling: from the router that scales, and then to each router."""

    event: ScalingEvent


class Serves(msgspec.Struct, frozen=True, tag="serves"):
    """An adapter of this name is served, or no longer if it is None. From one router, and to all others."""

    name: AdapterName
    adapter: Adapter | None


class GaveUp(msgspec.Struct, frozen=True, tag="gave_up"):
    """An added worker could not be started."""

    worker_id: str
    reason: str


class Replaced(msgspec.Struct, frozen=True, tag="replaced"):
    """A "worker", its "actor" or its host's "template" is restarted."""

    process: str


class StopRouter(msgspec.Struct, frozen=True, tag="stop"):
    """Drain and end. After a second one the router does not wait for running requests."""


ToRouter = (
    StartRouter
    | WorkerDied
    | Expect
    | LetGo
    | Scaled
    | Begun
    | Decided
    | Serves
    | GaveUp
    | Lead
    | Replaced
    | StopRouter
)


class KnownWorker(msgspec.Struct, frozen=True):
    incarnation: str
    silence_s: float
    start_up: dict[str, str]


class RouterReport(msgspec.Struct, frozen=True, tag="report"):
    """Sent a few times a second: the router's workers by id, and its requests' demand by role."""

    workers: dict[str, KnownWorker]
    demand: dict[str, RoleDemand]


class Leaves(msgspec.Struct, frozen=True, tag="leaves"):
    """Asks to drain a worker, for good or to change its role. Answered by `LetGo`."""

    worker_id: str
    for_good: bool


class Renews(msgspec.Struct, frozen=True, tag="renews"):
    """A drained worker continues in another role."""

    worker_id: str
    role: str
    incarnation: str


class Scales(msgspec.Struct, frozen=True, tag="scales"):
    """Asks to change the number of workers. Answered by `Scaled`."""

    request: ScaleRequest


class Begins(msgspec.Struct, frozen=True, tag="begins"):
    """Asks to begin a change that excludes the same change by other routers. Answered by `Begun`."""

    change: Change


class Ends(msgspec.Struct, frozen=True, tag="ends"):
    """A change that had begun has ended, with or without success."""

    change: Change


class CannotStart(msgspec.Struct, frozen=True, tag="cannot_start"):
    reason: str


FromRouter = RouterReport | Leaves | Renews | Scales | Begins | Ends | Decided | Serves | CannotStart

to_router: BoundedDecoder[ToRouter] = BoundedDecoder(ToRouter)
from_router: BoundedDecoder[FromRouter] = BoundedDecoder(FromRouter)
