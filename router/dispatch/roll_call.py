"""Questions to workers about requests without news; lost requests are placed again.

A request is lost if a connection broke and took the message that brought the request to its worker, or the
last message of its answer. The question uses the same connection as the former, and its reply the same as the
latter, so a request with a message under way is never taken for lost.
"""

from __future__ import annotations

from collections import defaultdict

from protocol.router_to_worker import CallRoll
from protocol.worker_to_router import AbsentRequests
from router.dispatch import Core
from router.dispatch.dispatcher import Dispatcher
from router.requests.journal import LiveRequest
from router.workers.assignment import Assignment, Loads, Stage
from router.workers.registry import Worker

ASK_AFTER_S = 1.0
"""[seconds] Silence before a question: many step times, and about as long as clients wait after a death."""


class RollCall:
    """The search for lost requests. Runs on the event loop only."""

    def __init__(self, core: Core, loads: Loads, dispatcher: Dispatcher) -> None:
        _, self._journal, self._registry, self._metrics, self._send = core
        self._loads = loads
        self._dispatcher = dispatcher

    def sweep(self, now: float) -> None:
        """Ask about requests without news for `ASK_AFTER_S`. To be called a few times a second."""
        silent: defaultdict[Worker, list[str]] = defaultdict(list)
        for request, at in self._journal.assigned():
            is_sent = at.stage is not Stage.HELD
            if is_sent and now - max(request.last_message_at, request.asked_at) > ASK_AFTER_S:
                silent[at.worker].append(request.request_id)
                request.asked_at = now
        for worker, request_ids in silent.items():
            if worker.is_reachable:
                self._send(worker, CallRoll(incarnation=worker.key.incarnation, request_ids=request_ids))

    def absent(self, message: AbsentRequests) -> None:
        worker = self._registry.current(message.worker_id, message.incarnation)
        if worker is None:
            self._metrics.count("messages_dropped_total", "stale_incarnation")
            return
        for request_id in message.request_ids:
            request = self._journal.get(request_id)
            at = request.current if request is not None else None
            if request is not None and at is not None and at.worker is worker:
                self._on_absent(request, at)

    def _on_absent(self, request: LiveRequest, at: Assignment) -> None:
        if at.stage is Stage.TRANSFER:
            self._loads.handed_over(at)
            return
        self._metrics.count("requests_lost_total")
        reason = f"worker {at.worker.key.worker_id} has nothing of it: a message got lost"
        self._dispatcher.lost(request, at, reason)
