"""Empties workers that are to leave: what they run goes on elsewhere, with its KV.

A request that decodes is moved in two steps. While it still runs, its new worker fetches the KV of all full
blocks into the prefix cache. Then it is placed there anew, and the few tokens that were generated meanwhile
are computed again: the client waits for that alone.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from protocol.config import ServeConfig
from protocol.ids import new_incarnation
from protocol.roles import ROLES, RoleSpec
from protocol.router_to_worker import Leave, Prefetch, PrepareToLeave
from protocol.worker_to_router import Leaving, Prefetched
from router.dispatcher import Dispatcher
from router.errors import ApiError
from router.journal import Journal, LiveRequest
from router.metrics import Metrics
from router.placer import Placer, Send
from router.registry import Registry, Worker
from router.request_log import ids

logger = logging.getLogger(__name__)


class NextLife(NamedTuple):
    """What a worker is to be after it was drained."""

    role: RoleSpec
    incarnation: str


@dataclass
class DrainReport:
    """What became of the requests of workers that have left, and how long that took."""

    moved: int = 0
    redirected: int = 0
    placed_again: int = 0
    seconds: float = 0.0

    def add(self, drained: DrainReport) -> None:
        """Count the requests of one more worker."""
        self.moved += drained.moved
        self.redirected += drained.redirected
        self.placed_again += drained.placed_again


@dataclass(eq=False)
class Drain:
    """A worker that is to leave, or to go on in another role. `moves` are the requests being prefetched."""

    worker: Worker
    began: float
    next: NextLife | None
    done: asyncio.Future[DrainReport]
    moves: dict[str, tuple[LiveRequest, Worker]] = field(default_factory=dict)
    failed: set[str] = field(default_factory=set)
    """Requests that no worker could prefetch: they end where they are, or are placed anew at the deadline."""
    report: DrainReport = field(default_factory=DrainReport)


async def _spare_any(worker_id: str, for_good: bool) -> str:
    return ""


class Drainer:
    """Runs on the event loop alone.

    `let_go(worker_id, for_good)` asks the launcher, as all routers do, why a worker can't be spared; "": it
    can, and is not started anew, or gets another role or a new process. `renew(worker_id, role, incarnation)`
    tells it that the worker has that role. Other routers learn from the worker that it leaves; each takes its
    own requests away.
    """

    def __init__(
        self,
        config: ServeConfig,
        journal: Journal,
        registry: Registry,
        metrics: Metrics,
        send: Send,
        placer: Placer,
        dispatcher: Dispatcher,
    ) -> None:
        self._config = config
        self._journal = journal
        self._registry = registry
        self._metrics = metrics
        self._send = send
        self._placer = placer
        self._dispatcher = dispatcher
        self._drains: dict[Worker, Drain] = {}
        self.let_go: Callable[[str, bool], Awaitable[str]] = _spare_any
        self.renew: Callable[[str, str, str], None] = lambda worker_id, role, incarnation: None

    # --- what operators and workers ask for -------------------------------------------------------

    async def drain(self, worker_id: str) -> asyncio.Future[DrainReport]:
        """Have the worker leave for good. Raises `ApiError`, with nothing changed."""
        worker = self._to_be_drained(worker_id)
        if worker not in self._drains:
            await self._ask_for(worker, for_good=True)
            worker = self._to_be_drained(worker_id)
            self._send(worker, PrepareToLeave(incarnation=worker.key.incarnation))
        return self._start(worker, None).done

    def _to_be_drained(self, worker_id: str) -> Worker:
        worker = self._known(worker_id)
        drain = self._drains.get(worker)
        if drain is not None and drain.next is not None:
            raise ApiError(409, f"worker {worker_id} changes its role: it can leave after that")
        return worker

    async def change_role(self, worker_id: str, role: RoleSpec) -> asyncio.Future[DrainReport]:
        """Have the worker go on in another role. Raises `ApiError`, with nothing changed."""
        worker = self._to_be_changed(worker_id, role)
        await self._ask_for(worker, for_good=False)
        worker = self._to_be_changed(worker_id, role)
        life = NextLife(role, new_incarnation())
        message = PrepareToLeave(
            incarnation=worker.key.incarnation, role=role.name, next_incarnation=life.incarnation
        )
        self._send(worker, message)
        return self._start(worker, life).done

    async def restart(self, worker_id: str) -> asyncio.Future[DrainReport]:
        """Have the worker's process end, and the launcher start it anew. Raises `ApiError`, with nothing
        changed.
        """
        worker = self._not_leaving(worker_id)
        await self._ask_for(worker, for_good=False)
        worker = self._not_leaving(worker_id)
        self._send(worker, PrepareToLeave(incarnation=worker.key.incarnation))
        return self._start(worker, None).done

    def _not_leaving(self, worker_id: str) -> Worker:
        worker = self._known(worker_id)
        if worker in self._drains:
            raise ApiError(409, f"worker {worker_id} is leaving already")
        return worker

    def _to_be_changed(self, worker_id: str, role: RoleSpec) -> Worker:
        worker = self._not_leaving(worker_id)
        if worker.role == role:
            raise ApiError(409, f"worker {worker_id} is a {role.name} worker already")
        if worker.role.holds_draft or role.holds_draft:
            raise ApiError(
                409, f"worker {worker_id} cannot be a {role.name} worker: that needs another model"
            )
        return worker

    def leaving(self, message: Leaving) -> None:
        """A worker was told to leave, by whoever may do that: nobody is asked whether it can be spared."""
        worker = self._registry.current(message.worker_id, message.incarnation)
        role = ROLES.get(message.role or "")
        if worker is None:
            self._metrics.dropped("stale_incarnation")
        elif role is None or message.next_incarnation is None:
            self._start(worker, None)
        else:
            self._start(worker, NextLife(role, message.next_incarnation))

    def _known(self, worker_id: str) -> Worker:
        known = {worker.key.worker_id: worker for worker in self._registry if worker.live}
        if worker_id not in known:
            there = f"there are {', '.join(sorted(known))}" if known else "there is none"
            raise ApiError(404, f"there is no worker {worker_id[:64]!r}; {there}")
        return known[worker_id]

    async def _ask_for(self, worker: Worker, for_good: bool) -> None:
        """Without a decode worker nothing runs; without a prefill worker the decode workers do all of it.

        The launcher is asked too: another router may be about to drain the others.
        """
        others = [other for other in self._registry.live() if other is not worker]
        if any(other.role.purpose == "decode" for other in others):
            reason = await self.let_go(worker.key.worker_id, for_good)
        else:
            is_last = worker.role.purpose == "decode"
            reason = "it is the last decode worker" if is_last else "no decode worker is left"
        if reason:
            raise ApiError(
                409, f"worker {worker.key.worker_id} cannot be spared: {reason}", code="last_worker"
            )

    def _start(self, worker: Worker, life: NextLife | None) -> Drain:
        drain = self._drains.get(worker)
        if drain is None:
            logger.info("worker %s is drained", worker.key.worker_id)
            self._registry.drain(worker)
            self._placer.drafts.leave(worker)
            done = asyncio.get_running_loop().create_future()
            drain = self._drains[worker] = Drain(worker, time.monotonic(), life, done)
            self._advance(drain)
        return drain

    # --- what goes on meanwhile -------------------------------------------------------------------

    def sweep(self) -> None:
        """Look what every worker that is to leave still has. To be called a few times a second."""
        for drain in list(self._drains.values()):
            self._advance(drain)

    def prefetched(self, message: Prefetched) -> None:
        """A worker has the KV of a request that another one runs, or as much of it as was to be had."""
        for drain in list(self._drains.values()):
            move = drain.moves.pop(message.request_id, None)
            if move is None:
                continue
            request, target = move
            if self._journal.get(message.request_id) is not request or drain.worker not in request.holders:
                return  # it has ended meanwhile
            if message.complete and target in self._registry.live():
                self._move(drain, request, target)
            else:
                drain.failed.add(message.request_id)
            self._advance(drain)
            return

    def lost(self, worker: Worker) -> None:
        """It died. What it was to take is looked at anew; its own requests are placed anew by others."""
        for drain in list(self._drains.values()):
            for request_id in [id for id, (_, target) in drain.moves.items() if target is worker]:
                del drain.moves[request_id]
        if worker in self._drains:
            drain = self._drains.pop(worker)
            drain.done.set_exception(
                ApiError(502, f"worker {worker.key.worker_id} was lost as it was drained")
            )
            drain.done.exception()  # nobody may be waiting

    def _advance(self, drain: Drain) -> None:
        worker = drain.worker
        is_late = time.monotonic() > drain.began + self._config.drain_timeout
        for request in [request for request in self._journal if worker in request.holders]:
            if is_late or (request.request_id not in drain.moves and request.request_id not in drain.failed):
                self._take_away(drain, request, is_late)
        if not any(worker in request.holders for request in self._journal):
            self._finish(drain)

    def _take_away(self, drain: Drain, request: LiveRequest, is_late: bool) -> None:
        """Begin to do so, or leave the request there for now."""
        worker = drain.worker
        decodes = worker is request.assigned.get("decode")
        if request in self._placer.ahead:
            self._place_again(drain, request)
        elif decodes and "prefill" in request.assigned:
            self._dispatcher.redirect(request, "drain", f"worker {worker.key.worker_id} leaves")
            drain.report.redirected += 1
        elif is_late or (decodes and not request.has_answered):
            self._place_again(drain, request)
        elif decodes:
            self._prefetch(drain, request)

    def _prefetch(self, drain: Drain, request: LiveRequest) -> None:
        target = self._placer.other_decode(request, drain.worker)
        if target is None:
            return
        left = max(request.generation.deadline - time.monotonic(), 0.0)
        message = Prefetch(
            incarnation=target.key.incarnation,
            request=request.engine_request(left),
            prefix=drain.worker.address,
        )
        if self._send(target, message):
            drain.moves[request.request_id] = request, target

    def _move(self, drain: Drain, request: LiveRequest, target: Worker) -> None:
        if self._placer.move(request, target):
            drain.report.moved += 1
            request.times.num_migrated += 1
            self._metrics.migrated()
            goes_on = "request %s goes on at %s"
            logger.info(goes_on, request.request_id, target.key.worker_id, extra=ids(request))
        else:
            self._place_again(drain, request)

    def _place_again(self, drain: Drain, request: LiveRequest) -> None:
        self._dispatcher.place_again(request, "drain", f"worker {drain.worker.key.worker_id} leaves")
        drain.report.placed_again += 1

    def _finish(self, drain: Drain) -> None:
        worker, report = drain.worker, drain.report
        del self._drains[worker]
        report.seconds = time.monotonic() - drain.began
        logger.info("worker %s is empty: %s", worker.key.worker_id, report)
        if drain.next is not None:
            self.renew(worker.key.worker_id, drain.next.role.name, drain.next.incarnation)
        self._send(worker, Leave(incarnation=worker.key.incarnation))
        self._registry.dismiss(worker)
        drain.done.set_result(report)
