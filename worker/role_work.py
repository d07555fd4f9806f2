"""The interface of a role's work, and the requests of a worker."""

from __future__ import annotations

import enum
import logging
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping
from typing import Any, ClassVar, Generic, TypeVar

import msgspec

from kvtransfer.interface import ReceiveEvent, SendEvent
from protocol.ids import PeerAddress
from protocol.outputs import ErrorKind, TokenOutput
from protocol.requests import DraftPlan, EngineRequest
from protocol.router_to_worker import Generate
from protocol.worker_to_worker import PeerReply, PeerRequest
from worker.link import RouterLinks
from worker.parts import WorkerParts

log = logging.getLogger(__name__)


class RoleWork(ABC):
    """The base class of all roles' loops. Belongs to the loop's thread. `requests` holds the requests on this
    worker, `outbox` the outputs not yet sent to the routers.
    """

    requests: RequestTable[Any]

    def __init__(self, parts: WorkerParts, links: RouterLinks) -> None:
        self.parts = parts
        self.config = parts.config
        self.counters = parts.counters
        self.links = links
        self.outbox: list[TokenOutput] = []

    @abstractmethod
    def start_request(self, message: Generate) -> None:
        """Add a new request to the engine. May raise `InvalidRequestError`."""

    def abort(self, request_id: str) -> None:
        """Forget a request in any stage. Unknown ids are ignored."""
        request = self.requests.get(request_id)
        if request is not None:
            self._end(request)

    @abstractmethod
    def _end(self, request: Any) -> None:
        """Free everything that a request of this role holds, in any stage."""

    def redirect(self, request_id: str, decode: PeerAddress | None) -> None:
        """Hand a request over to another decode worker, or decode it here if None. For prefill workers."""
        self.counters.add("dropped_messages_total")

    def replan(self, request_id: str, plan: DraftPlan | None) -> None:
        """Draft for the request as `plan` says. For decode workers only."""
        self.counters.add("dropped_messages_total")

    def peer_gone(self, peer: bytes) -> None:
        """Free the requests of a lost worker with the identity `peer`. For draft workers only."""
        self.counters.add("dropped_messages_total")

    def knows(self, request_id: str) -> bool:
        """Return whether the request is on this worker."""
        return request_id in self.requests

    def under_way(self) -> list[str]:
        """Return the ids of the requests that hold resources here, in any stage."""
        return [request.request_id for request in self.requests]

    @abstractmethod
    def computing(self) -> list[str]:
        """Return the ids of the requests for which the engine still has to compute something."""

    def on_peer_request(self, identity: bytes, request: PeerRequest) -> None:
        """Handle a request of another worker that only this role can answer."""
        self.counters.add("dropped_messages_total")
        log.warning("dropped a message that is not for a %s worker", self.parts.role.name)

    def on_peer_reply(self, peer: PeerAddress, reply: PeerReply) -> None:
        """Handle another worker's answer to a request of this role."""
        self.counters.add("stale_messages_total")

    @abstractmethod
    def on_transfer(self, event: ReceiveEvent | SendEvent) -> None:
        """Handle an event of one of the role's leases."""

    def peers_in_use(self) -> set[str]:
        """Return the incarnations from which the role awaits something."""
        return set()

    def before_step(self, first_time: list[EngineRequest]) -> None:
        """Prepare for a step in which the engine first schedules these requests."""
        return

    def with_timing(self, outputs: list[TokenOutput], began: float) -> list[TokenOutput]:
        """Return a step's outputs with their requests' timings. The step began at `began`."""
        return outputs

    def deliver(self, outputs: list[TokenOutput]) -> None:
        """Send a step's outputs to the router."""
        self.outbox += outputs
        self.flush()

    @abstractmethod
    def after_step(self, outputs: list[TokenOutput]) -> None:
        """Do the role's work after a step whose outputs have been sent to the router."""

    @abstractmethod
    def expire(self, now: float) -> None:
        """Give up everything whose deadline has passed. `now` is `time.monotonic()`."""

    def fail(self, request_id: str, kind: ErrorKind, reason: str) -> None:
        """Free the request's resources and tell the router why it ends."""
        self.abort(request_id)
        self.answer_error(request_id, kind, reason)

    def answer_error(self, request_id: str, kind: ErrorKind, reason: str) -> None:
        self.outbox.append(
            TokenOutput(
                request_id=request_id,
                token_ids=[],
                finish_reason="error",
                error_kind=kind,
                error=reason[:4096],
            )
        )

    def flush(self) -> None:
        """Send the outputs in the outbox."""
        self.links.send_outputs(self.outbox)
        self.outbox = []


StageT = TypeVar("StageT", bound=enum.Enum)


class IllegalTransitionError(Exception):
    """A request was moved to a stage that cannot follow its current one: a bug of this worker."""


class StagedRequest(Generic[StageT]):
    """A request in one of the stages of its class. `next_stages` maps a stage to the stages that may follow
    it; ENDED may follow every other stage.

    `deadline` is in monotonic seconds, or None while nothing is awaited from another worker.
    """

    next_stages: ClassVar[Mapping[Any, Collection[Any]]]
    request: EngineRequest
    stage: StageT
    lease_id: str | None = None
    deadline: float | None = None

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def held_lease(self) -> str:
        """The id of the request's lease; the request must have one."""
        assert self.lease_id is not None
        return self.lease_id

    @property
    def token_ids(self) -> list[int]:
        """The tokens whose KV is handed over: the prompt, and the tokens emitted before a failover."""
        return self.request.prompt_token_ids + self.request.output_token_ids

    @property
    def num_tokens(self) -> int:
        return len(self.request.prompt_token_ids) + len(self.request.output_token_ids)

    def enter(self, stage: StageT) -> None:
        """Move to a stage. Raises `IllegalTransitionError` and changes nothing if it cannot follow."""
        ends = stage.name == "ENDED" and stage is not self.stage
        if not ends and stage not in self.next_stages.get(self.stage, ()):
            raise IllegalTransitionError(f"{self.request_id}: {self.stage.name} -> {stage.name}")
        self.stage = stage

    def replan(self, plan: DraftPlan | None) -> None:
        """Set the place where the request's drafts are made."""
        self.request = msgspec.structs.replace(self.request, draft_plan=plan)

    def is_overdue(self, now: float) -> bool:
        return self.deadline is not None and now >= self.deadline


RequestT = TypeVar("RequestT", bound=StagedRequest[Any])


class RequestTable(Generic[RequestT]):
    """Requests by id and by lease.

    An abandoned request may keep its lease longer than its id, until no transfer writes to its blocks.
    Meanwhile a newer request may have the id.
    """

    def __init__(self) -> None:
        self._by_id: dict[str, RequestT] = {}
        self._by_lease: dict[str, RequestT] = {}

    def __len__(self) -> int:
        return len(self._by_id.keys() | {request.request_id for request in self._by_lease.values()})

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._by_id

    def __iter__(self) -> Iterator[RequestT]:
        """Iterate over the requests that own their ids, oldest first. The table may change meanwhile."""
        return iter(list(self._by_id.values()))

    def get(self, request_id: str) -> RequestT | None:
        return self._by_id.get(request_id)

    def with_lease(self, lease_id: str) -> RequestT | None:
        return self._by_lease.get(lease_id)

    def insert(self, request: RequestT) -> None:
        assert request.request_id not in self._by_id
        self._by_id[request.request_id] = request

    def release_id(self, request: RequestT) -> None:
        """Free the request's id for another request. Idempotent."""
        if self._by_id.get(request.request_id) is request:
            del self._by_id[request.request_id]

    def grant_lease(self, request: RequestT, lease_id: str) -> None:
        request.lease_id = lease_id
        self._by_lease[lease_id] = request

    def drop_lease(self, request: RequestT) -> None:
        """Remove the request's lease. Idempotent."""
        if request.lease_id is not None:
            del self._by_lease[request.lease_id]
            request.lease_id = None
