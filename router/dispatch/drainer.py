"""Moves of all requests, with their KV, from workers that are about to leave to other workers.

A decoding request moves in two steps. While it still runs, its new worker fetches the KV of all full blocks
into its prefix cache. Then the request is placed there, and only the tokens generated in the meantime are
computed again: the client waits for these alone.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from protocol.ids import new_incarnation
from protocol.roles import ROLES, RoleSpec
from protocol.router_to_worker import Leave, Prefetch, PrepareToLeave
from protocol.worker_to_router import Leaving, Prefetched
from router.dispatch import Core
from router.dispatch.dispatcher import Dispatcher
from router.dispatch.placer import Placer
from router.errors import ApiError
from router.observe.timing import ids
from router.requests.journal import LiveRequest
from router.workers.assignment import Assignment, Stage
from router.workers.registry import Worker

logger = logging.getLogger(__name__)


class NextRole(NamedTuple):
    """The role and the incarnation that a worker gets after it was drained."""

    role: RoleSpec
    incarnation: str


@dataclass
class DrainReport:
    """Numbers of requests by outcome at drained workers, and the duration of the drain."""

    moved: int = 0
    redirected: int = 0
    placed_again: int = 0
    seconds: float = 0.0

    def __str__(self) -> str:
        counts = f"moved: {self.moved}, redirected: {self.redirected}, placed again: {self.placed_again}"
        return f"requests {counts}, in {self.seconds:.2f} s"

    def add(self, drained: DrainReport) -> None:
        self.moved += drained.moved
        self.redirected += drained.redirected
        self.placed_again += drained.placed_again


@dataclass(eq=False)
class Drain:
    """A worker that leaves or changes its role. `moves` has the requests that are being prefetched."""

    worker: Worker
    began: float
    next: NextRole | None
    done: asyncio.Future[DrainReport]
    moves: dict[str, tuple[LiveRequest, Worker]] = field(default_factory=dict)
    failed: set[str] = field(default_factory=set)
    """Requests that no worker could prefetch. They end on this worker, or are placed again at the deadline.
    """
    report: DrainReport = field(default_factory=DrainReport)


async def _spare_any(worker_id: str, for_good: bool) -> str:
    return ""


class Drainer:
    """The drains of workers. Runs on the event loop only.

    `let_go(worker_id, for_good)` asks the launcher, which knows all routers, and returns why the worker
    cannot be spared, or "". `for_good` is false if the worker only gets another role or a new process.
    `renew(worker_id, role, incarnation)` tells the launcher the worker's new role. Other routers learn from
    the worker that it leaves, and move their own requests.
    """

    def __init__(self, core: Core, placer: Placer, dispatcher: Dispatcher) -> None:
        self._config, self._journal, self._registry, self._metrics, self._send = core
        self._placer = placer
        self._dispatcher = dispatcher
        self._drains: dict[Worker, Drain] = {}
        self.let_go: Callable[[str, bool], Awaitable[str]] = _spare_any
        self.renew: Callable[[str, str, str], None] = lambda worker_id, role, incarnation: None

    async def drain(self, worker_id: str) -> asyncio.Future[DrainReport]:
        """Drain a worker that leaves for good. Raises `ApiError`, with nothing changed."""
        if (drain := self._drains.get(self._to_be_drained(worker_id))) is not None:
            return drain.done
        return await self._begin_leaving(lambda: self._to_be_drained(worker_id), for_good=True)

    async def change_role(self, worker_id: str, role: RoleSpec) -> asyncio.Future[DrainReport]:
        """Drain a worker and change its role. Raises `ApiError`, with nothing changed."""
        life = NextRole(role, new_incarnation())
        return await self._begin_leaving(lambda: self._to_be_changed(worker_id, role), life)

    async def restart(self, worker_id: str) -> asyncio.Future[DrainReport]:
        """Drain a worker whose process is then replaced. Raises `ApiError`, with nothing changed."""
        return await self._begin_leaving(lambda: self._not_leaving(worker_id))

    async def _begin_leaving(
        self, check: Callable[[], Worker], life: NextRole | None = None, *, for_good: bool = False
    ) -> asyncio.Future[DrainReport]:
        """Ask the launcher, then drain the worker that `check` returns; `check` runs before and after."""
        await self._ask_for(check(), for_good)
        worker, incarnation = check(), None if life is None else life.incarnation
        role = None if life is None else life.role.name
        message = PrepareToLeave(incarnation=worker.key.incarnation, role=role, next_incarnation=incarnation)
        self._send(worker, message)
        return self._start(worker, life).done

    def _to_be_drained(self, worker_id: str) -> Worker:
        worker = self._known(worker_id)
        drain = self._drains.get(worker)
        if drain is not None and drain.next is not None:
            raise ApiError(409, f"worker {worker_id} changes its role: it can leave after that")
        return worker

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
            reason = f"worker {worker_id} cannot be a {role.name} worker: that needs another model"
            raise ApiError(409, reason)
        return worker

    def leaving(self, message: Leaving) -> None:
        """Drain a worker that was already told to leave, whether or not it can be spared."""
        worker = self._registry.current(message.worker_id, message.incarnation)
        role = ROLES.get(message.role or "")
        if worker is None:
            self._metrics.count("messages_dropped_total", "stale_incarnation")
        elif role is None or message.next_incarnation is None:
            self._start(worker, None)
        else:
            self._start(worker, NextRole(role, message.next_incarnation))

    def _known(self, worker_id: str) -> Worker:
        known = {worker.key.worker_id: worker for worker in self._registry if worker.live}
        if worker_id not in known:
            there = f"there are {', '.join(sorted(known))}" if known else "there is none"
            raise ApiError(404, f"there is no worker {worker_id[:64]!r}; {there}")
        return known[worker_id]

    async def _ask_for(self, worker: Worker, for_good: bool) -> None:
        """Ask for permission to drain the worker. Raises `ApiError` if it cannot be spared.

        Without a decode worker nothing runs; without a prefill worker the decode workers compute the prompts.
        The launcher is asked too, since another router may be about to drain the other workers.
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

    def _start(self, worker: Worker, life: NextRole | None) -> Drain:
        drain = self._drains.get(worker)
        if drain is None:
            logger.info("worker %s is drained", worker.key.worker_id)
            self._registry.drain(worker)
            self._placer.drafts.leave(worker)
            done = asyncio.get_running_loop().create_future()
            drain = self._drains[worker] = Drain(worker, time.monotonic(), life, done)
            self._advance(drain)
        return drain

    def sweep(self) -> None:
        """Advance all drains. To be called a few times a second."""
        for drain in list(self._drains.values()):
            self._advance(drain)

    def prefetched(self, message: Prefetched) -> None:
        """Move a request whose new worker has fetched its KV blocks, as far as they were available."""
        for drain in list(self._drains.values()):
            move = drain.moves.pop(message.request_id, None)
            if move is None:
                continue
            request, target = move
            at = request.current
            if (
                self._journal.get(message.request_id) is not request
                or at is None
                or at.decode is not drain.worker
            ):
                return  # it has ended in the meantime
            if message.complete and target in self._registry.live():
                self._move(drain, request, target)
            else:
                drain.failed.add(message.request_id)
            self._advance(drain)
            return

    def lost(self, worker: Worker) -> None:
        """Cancel moves to a worker that died, and its drain. The dispatcher places its requests again."""
        for drain in list(self._drains.values()):
            for request_id in [id for id, (_, target) in drain.moves.items() if target is worker]:
                del drain.moves[request_id]
        if worker in self._drains:
            drain = self._drains.pop(worker)
            drain.done.set_exception(
                ApiError(502, f"worker {worker.key.worker_id} was lost as it was drained")
            )
            drain.done.exception()  # marks the error as seen: the future may have no waiter

    def _advance(self, drain: Drain) -> None:
        worker = drain.worker
        is_late = time.monotonic() > drain.began + self._config.drain_timeout
        for request, at in self._held(worker):
            if is_late or (request.request_id not in drain.moves and request.request_id not in drain.failed):
                self._take_away(drain, request, at, is_late)
        if not self._held(worker):
            self._finish(drain)

    def _held(self, worker: Worker) -> list[tuple[LiveRequest, Assignment]]:
        return [(request, at) for request, at in self._journal.assigned() if worker in at.holders]

    def _take_away(self, drain: Drain, request: LiveRequest, at: Assignment, is_late: bool) -> None:
        """Begin to move the request, or leave it on the worker for now."""
        decodes = drain.worker is at.decode
        if at.stage is Stage.HELD:
            self._place_again(drain, request)
        elif decodes and at.prefill is not None:
            self._dispatcher.redirect(request, "drain", f"worker {drain.worker.key.worker_id} leaves")
            drain.report.redirected += 1
        elif is_late or (decodes and not at.has_answered):
            self._place_again(drain, request)
        elif decodes:
            self._prefetch(drain, request)

    def _prefetch(self, drain: Drain, request: LiveRequest) -> None:
        target = self._placer.other_decode(request, drain.worker)
        if target is None:
            return
        left = max(request.generation.deadline - time.monotonic(), 0.0)
        asked, holder = request.engine_request(left), drain.worker.address
        message = Prefetch(incarnation=target.key.incarnation, request=asked, prefix=holder)
        if self._send(target, message):
            drain.moves[request.request_id] = request, target

    def _move(self, drain: Drain, request: LiveRequest, target: Worker) -> None:
        if self._placer.move(request, target):
            drain.report.moved += 1
            request.times.num_migrated += 1
            self._metrics.count("requests_migrated_total")
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
