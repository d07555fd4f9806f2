"""The draft worker's loop."""

from __future__ import annotations

from kvtransfer.interface import ReceiveEvent, SendEvent
from protocol.errors import InvalidRequestError
from protocol.messages import Generate, TokenOutput
from worker.loop import WorkerLoop


class DraftLoop(WorkerLoop):
    """Drafts for decode workers; takes no request of the router."""

    def start_request(self, message: Generate) -> None:
        raise InvalidRequestError("request", f"{self.parts.worker_id} is a draft worker: it only drafts")

    def abort(self, request_id: str) -> None:
        """Unknown ids are ignored."""

    def knows(self, request_id: str) -> bool:
        return False

    def computing(self) -> list[str]:
        return []

    def on_transfer(self, event: ReceiveEvent | SendEvent) -> None:
        """Nothing is transferred."""

    def after_step(self, outputs: list[TokenOutput]) -> None:
        """Nothing follows."""

    def expire(self, now: float) -> None:
        """Nothing is awaited."""
