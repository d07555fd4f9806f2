"""What the launcher and a router's process say to each other, over a local socket."""

from __future__ import annotations

import msgspec

from messaging.sockets import ClusterKeys
from protocol.adapters import Adapter, AdapterName
from protocol.codec import BoundedDecoder
from protocol.config import ServeConfig
from router.demand import RoleDemand
from router.scaling.interface import ScaleAnswer, ScaleRequest
from router.scaling.log import ScalingEvent
from router.scaling.turns import Change
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
    """Workers with these ids and roles are kept running, so requests may wait for them. `room`: how many more
    of each role there could be.
    """

    roles: dict[str, str]
    room: dict[str, int]


class LetGo(msgspec.Struct, frozen=True, tag="let_go"):
    """Answers `Leaves`: the worker may, or why not."""

    worker_id: str
    refusal: str


class Scaled(msgspec.Struct, frozen=True, tag="scaled"):
    """Answers `Scales`, in their order."""

    answer: ScaleAnswer


class Begun(msgspec.Struct, frozen=True, tag="begun"):
    """Answers `Begins`, in their order: the change may, or why not."""

    refusal: str


class Lead(msgspec.Struct, frozen=True, tag="lead"):
    """Answers the `Report` of the router that scales for all; `demand` is the others'."""

    demand: dict[str, RoleDemand]


class Decided(msgspec.Struct, frozen=True, tag="decided"):
    """The number of workers changes by itself, or could not: from the router that scales, and to each."""

    event: ScalingEvent


class Serves(msgspec.Struct, frozen=True, tag="serves"):
    """The adapter of this name is served from now on; None: no longer. From the router that was asked, and to
    all others.
    """

    name: AdapterName
    adapter: Adapter | None


class GaveUp(msgspec.Struct, frozen=True, tag="gave_up"):
    """A worker that was added could not be started."""

    worker_id: str
    reason: str


class Replaced(msgspec.Struct, frozen=True, tag="replaced"):
    """A "worker", its "actor" or its host's "template" is started anew."""

    process: str


class StopRouter(msgspec.Struct, frozen=True, tag="stop"):
    """Drain and end. A second one does not wait for running requests."""


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


class Report(msgspec.Struct, frozen=True, tag="report"):
    """The router runs, and knows these workers by their ids; what its requests ask of each
    role. Sent a few times a second."""

    workers: dict[str, KnownWorker]
    demand: dict[str, RoleDemand]


class Leaves(msgspec.Struct, frozen=True, tag="leaves"):
    """The worker is to be drained, for good or to change its role. Answered by `LetGo`."""

    worker_id: str
    for_good: bool


class Renews(msgspec.Struct, frozen=True, tag="renews"):
    """The worker goes on in another role."""

    worker_id: str
    role: str
    incarnation: str


class Scales(msgspec.Struct, frozen=True, tag="scales"):
    """The number of workers is to change. Answered by `Scaled`."""

    request: ScaleRequest


class Begins(msgspec.Struct, frozen=True, tag="begins"):
    """What no other router may change meanwhile is to change. Answered by `Begun`."""

    change: Change


class Ends(msgspec.Struct, frozen=True, tag="ends"):
    """A change that had begun has ended, well or not."""

    change: Change


class CannotStart(msgspec.Struct, frozen=True, tag="cannot_start"):
    reason: str


FromRouter = Report | Leaves | Renews | Scales | Begins | Ends | Decided | Serves | CannotStart

to_router: BoundedDecoder[ToRouter] = BoundedDecoder(ToRouter)
from_router: BoundedDecoder[FromRouter] = BoundedDecoder(FromRouter)
