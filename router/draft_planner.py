"""Tells workers where each request's drafts are made, and tells them anew when draft workers come or go."""

from __future__ import annotations

import logging
from collections.abc import Callable

import msgspec

from protocol.config import ServeConfig
from protocol.messages import DraftPlan, Replan
from protocol.speculation import RequestSpeculation
from router.journal import Journal, LiveRequest
from router.registry import Registry, Worker

logger = logging.getLogger(__name__)


class DraftPlanner:
    """Runs on the event loop alone. Without draft workers in the deployment it plans nothing."""

    def __init__(
        self,
        config: ServeConfig,
        journal: Journal,
        registry: Registry,
        send: Callable[[Worker, msgspec.Struct], bool],
    ) -> None:
        self._options = config.speculative_config
        self._is_needed = config.draft_replicas > 0
        self._journal = journal
        self._registry = registry
        self._send = send
        self._known: frozenset[str] = frozenset()
        """The incarnations that could draft at the latest look."""
        self._turn = 0

    def plan(self, request: LiveRequest) -> DraftPlan | None:
        """For a request that is being placed. It stays with its draft worker as long as that is there; new
        ones go to all of them in turn.
        """
        asked = request.generation.speculation or RequestSpeculation()
        options = self._options
        if not self._is_needed or options is None or asked.method not in (None, options.method):
            return None
        drafters = self._drafters()
        if not drafters:
            return None
        before = request.draft_plan
        held = [worker for worker in drafters if before is not None and worker.address == before.at]
        if held:
            return before
        self._turn += 1
        chosen = drafters[self._turn % len(drafters)]
        return DraftPlan(method=options.method, max_tokens=options.max_speculative_tokens, at=chosen.address)

    def sweep(self) -> None:
        """Plan running requests anew if other draft workers are there than before."""
        known = frozenset(worker.key.incarnation for worker in self._drafters())
        if known == self._known:
            return
        self._known = known
        for request in self._journal:
            self._revise(request)

    def _revise(self, request: LiveRequest) -> None:
        decode = request.assigned.get("decode")
        plan = self.plan(request)
        if decode is None or plan == request.draft_plan:
            return
        request.draft_plan = plan
        message = Replan(incarnation=decode.key.incarnation, request_id=request.request_id, plan=plan)
        if not self._send(decode, message):
            logger.warning("request %s keeps a plan of drafts that is out of date", request.request_id)

    def _drafters(self) -> list[Worker]:
        return [w for w in self._registry if w.role.holds_draft and w.takes_requests]
