"""The messages between the launcher and routers that run in processes of their own."""

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
    """The first message to a router."""

    config: ServeConfig
    keys: ClusterKeys
    link_host: str
    place: RouterPlace


class WorkerDied(msgspec.Struct, frozen=True, tag="died"):
    worker_id: str
    incarnation: str
    reason: str


class Expect(msgspec.Struct, frozen=True, tag="expect"):
    """The workers to expect, as ids with roles, and the `room` for more workers of each role."""

    roles: dict[str, str]
    room: dict[str, int]


class LeaveAnswer(msgspec.Struct, frozen=True, tag="let_go"):
    """The answer to `LeaveRequest`. `refusal` is "" if the worker may leave, else the reason why not."""

    worker_id: str
    refusal: str


class Scaled(msgspec.Struct, frozen=True, tag="scaled"):
    """The answer to `Scales`. Answers come in the order of the questions."""

    answer: ScaleAnswer


class ChangeAnswer(msgspec.Struct, frozen=True, tag="begun"):
    """The answer to `ChangeRequest`, in the order of the requests. `refusal` is "", or why not."""

    refusal: str


class OtherDemand(msgspec.Struct, frozen=True, tag="lead"):
    """The answer to a `RouterReport` of the router that scales. `demand` is the sum over all others."""

    demand: dict[str, RoleDemand]


class AutoscalerEvent(msgspec.Struct, frozen=True, tag="decided"):
    """An event of autoscaling, from the router that scales to the launcher, and from there to all routers."""

    event: ScalingEvent


class AdapterChange(msgspec.Struct, frozen=True, tag="serves"):
    """A change of the adapter served under `name`: None if it no longer is. Relayed to all other routers."""

    name: AdapterName
    adapter: Adapter | None


class GaveUp(msgspec.Struct, frozen=True, tag="gave_up"):
    """The news that an added worker could not be started."""

    worker_id: str
    reason: str


class Replaced(msgspec.Struct, frozen=True, tag="replaced"):
    """The news that a "worker", its "actor" or its host's "template" is restarted."""

    process: str


class StopRouter(msgspec.Struct, frozen=True, tag="stop"):
    """The order to drain and end. After a second one the router does not wait for running requests."""


ToRouter = (
    StartRouter
    | WorkerDied
    | Expect
    | LeaveAnswer
    | Scaled
    | ChangeAnswer
    | AutoscalerEvent
    | AdapterChange
    | GaveUp
    | OtherDemand
    | Replaced
    | StopRouter
)


class KnownWorker(msgspec.Struct, frozen=True):
    incarnation: str
    silence_s: float
    start_up: dict[str, str]


class RouterReport(msgspec.Struct, frozen=True, tag="report"):
    """A report sent a few times a second: the router's workers by id, and its requests' demand by role."""

    workers: dict[str, KnownWorker]
    demand: dict[str, RoleDemand]


class LeaveRequest(msgspec.Struct, frozen=True, tag="leaves"):
    """A request to drain a worker, for good or to change its role. Answered by `LeaveAnswer`."""

    worker_id: str
    for_good: bool


class RoleChange(msgspec.Struct, frozen=True, tag="renews"):
    """The news that a drained worker continues in another role."""

    worker_id: str
    role: str
    incarnation: str


class Scales(msgspec.Struct, frozen=True, tag="scales"):
    """A request to change the number of workers. Answered by `Scaled`."""

    request: ScaleRequest


class ChangeRequest(msgspec.Struct, frozen=True, tag="begins"):
    """A request to begin a change that only one router may make at a time. Answered by `ChangeAnswer`."""

    change: Change


class ChangeEnd(msgspec.Struct, frozen=True, tag="ends"):
    """The end of a change that had begun, successful or not."""

    change: Change


class CannotStart(msgspec.Struct, frozen=True, tag="cannot_start"):
    reason: str


FromRouter = (
    RouterReport
    | LeaveRequest
    | RoleChange
    | Scales
    | ChangeRequest
    | ChangeEnd
    | AutoscalerEvent
    | AdapterChange
    | CannotStart
)

to_router: BoundedDecoder[ToRouter] = BoundedDecoder(ToRouter)
from_router: BoundedDecoder[FromRouter] = BoundedDecoder(FromRouter)
