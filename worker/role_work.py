"""What a role does with its requests. The rest of a worker's loop is the same for all roles."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from typing import Any

from kvtransfer.interface import ReceiveEvent, SendEvent
from protocol.outputs import ErrorKind, TokenOutput
from protocol.peers import PeerAddress
from protocol.requests import DraftPlan, EngineRequest
from protocol.router_to_worker import Generate
from protocol.worker_to_worker import PeerReply, PeerRequest
from worker.link import RouterLinks
from worker.parts import WorkerParts
from worker.requests import RequestTable

log = logging.getLogger(__name__)


class RoleWork(ABC):
    """Belongs to the loop's thread. `requests` has what is under way here, `outbox` the outputs that the
    routers have not been sent yet.
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
        """Give a new request to the engine. May raise `InvalidRequestError`."""

    @abstractmethod
    def abort(self, request_id: str) -> None:
        """Forget a request, whatever its stage. Unknown ids are ignored."""

    def redirect(self, request_id: str, decode: PeerAddress | None) -> None:
        """Hand a request over to another decode worker, or to nobody. For prefill workers only."""
        self.counters.add("dropped_messages_total")

    def replan(self, request_id: str, plan: DraftPlan | None) -> None:
        """Have the request's drafts made elsewhere. For decode workers only."""
        self.counters.add("dropped_messages_total")

    def peer_gone(self, peer: bytes) -> None:
        """Free what is held for another worker, known by this identity. For draft workers only."""
        self.counters.add("dropped_messages_total")

    @abstractmethod
    def knows(self, request_id: str) -> bool:
        """Whether the request is under way here."""

    @abstractmethod
    def under_way(self) -> list[str]:
        """The requests that hold something here, in whatever stage."""

    @abstractmethod
    def computing(self) -> list[str]:
        """The requests that the engine still has to compute something for."""

    def on_peer_request(self, identity: bytes, request: PeerRequest) -> None:
        """Another worker asks for something that only one of this role can give."""
        self.counters.add("dropped_messages_total")
        log.warning("dropped a message that is not for a %s worker", self.parts.role.name)

    def on_peer_reply(self, peer: PeerAddress, reply: PeerReply) -> None:
        """An answer to what the role asked another worker for."""
        self.counters.add("stale_messages_total")

    @abstractmethod
    def on_transfer(self, event: ReceiveEvent | SendEvent) -> None:
        """Something happened to one of the role's leases."""

    def peers_in_use(self) -> set[str]:
        """The incarnations that the role awaits something from."""
        return set()

    def before_step(self, first_time: list[EngineRequest]) -> None:
        """The engine takes these requests up, for the first time, in the step that runs next."""
        return

    def with_timing(self, outputs: list[TokenOutput], began: float) -> list[TokenOutput]:
        """The outputs of a step that began then (monotonic seconds), with how their requests came here."""
        return outputs

    def deliver(self, outputs: list[TokenOutput]) -> None:
        """Send what a step made to the router."""
        self.outbox += outputs
        self.flush()

    @abstractmethod
    def after_step(self, outputs: list[TokenOutput]) -> None:
        """The outputs are with the router; do what follows from them."""

    @abstractmethod
    def expire(self, now: float) -> None:
        """Give up whatever passed its deadline. `now` is `time.monotonic()`."""

    # --- answers ---------------------------------------------------------------------------------

    def fail(self, request_id: str, kind: ErrorKind, reason: str) -> None:
        """Free all that the request holds and tell the router why it ends."""
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
        """Send what is in the outbox."""
        self.links.send_outputs(self.outbox)
        self.outbox = []
