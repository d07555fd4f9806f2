"""Requests without news: races on other workers while their own is suspect, and questions about lost ones.

While a worker is suspect, its requests also run on other workers, and the first token decides. Equal seeds
give equal tokens, so a copy generates the same tokens as its request. It starts from the tokens in the
journal and from KV blocks that other workers hold. If the copy sends the next token first, it replaces the
request, else it is withdrawn. A request has at most one copy. A budget bounds the work of copies: it grows
with the time of all workers, and each copy costs the predicted time of its prefill. What was spent on a
worker that turns out to be lost is given back, since its requests would have been placed again anyway.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable

from protocol.outputs import TokenOutput
from protocol.router_to_worker import CallRoll
from protocol.worker_to_router import AbsentRequests
from router.dispatch import Core
from router.dispatch.placer import Placer
from router.observe.timing import ids
from router.requests.journal import LiveRequest
from router.workers.assignment import Assignment, Loads, Stage, alone_s
from router.workers.registry import Worker

logger = logging.getLogger(__name__)

SHARE = 0.01
"""The share of all workers' time that copies may take in the long run."""
AHEAD_S = 60.0
"""[seconds] Time whose `SHARE` may be spent at once, so copies take at most 2 % of any minute."""


class Races:
    """All races of requests with their copies. Runs on the event loop only.

    `place_again` moves a request that was not sent to a worker yet and needs no race.
    """

    def __init__(self, core: Core, placer: Placer, place_again: Callable[[LiveRequest], None]) -> None:
        _, self._journal, self._registry, self._metrics, _ = core
        self._placer = placer
        self._place_again = place_again
        self._spent_s = self._swept_at = 0.0
        """Predicted time of all copies, less the budget earned since they started."""
        self._is_spent = False
        self._spent_on: defaultdict[Worker, float] = defaultdict(float)
        """The part of the time that was spent on each worker's requests since it became suspect."""

    def sweep(self, now: float) -> None:
        """Start a race for each request that waits for a suspect worker. To be called often."""
        workers = list(self._registry)
        share = SHARE * len(workers)
        self._spent_s = max(self._spent_s - share * (now - self._swept_at), 0.0)
        self._swept_at = now
        for worker in [each for each in self._spent_on if not (each.live and each.is_suspect)]:
            del self._spent_on[worker]
        if not any(worker.is_suspect for worker in workers):
            return
        for request, at in self._journal.assigned():
            may_race = request.owner is None and request not in self._journal.copies
            suspect = self._suspect_of(request, at) if may_race else None
            if suspect is None or self._is_complete(request):
                continue
            if at.stage is Stage.HELD:
                self._place_again(request)
                continue
            if not self._can_pay(share * AHEAD_S) or not self._start(request, at, suspect):
                return

    def worker_lost(self, worker: Worker) -> None:
        """Give back what was spent on a worker that is lost."""
        self._spent_s = max(self._spent_s - self._spent_on.pop(worker, 0.0), 0.0)

    def is_first(self, copy: LiveRequest, output: TokenOutput) -> bool:
        """Decide a race by a copy's output. Return whether the output continues the owner's answer."""
        if output.token_ids and output.position < len(copy.output_token_ids):
            self._placer.withdraw([copy])
            return False
        self.won(copy)
        copy.times.num_placed_again += 1
        self._metrics.count("requests_placed_again_total", "raced")
        return True

    def settle(self) -> None:
        """Withdraw the copies whose requests got tokens from their own workers."""
        late = [copy for copy in self._journal.copies.values() if not _is_abreast(copy)]
        self._placer.withdraw(late)

    def successor(self, request: LiveRequest) -> LiveRequest | None:
        """Return the copy that can take the request's place, if there is one."""
        copy = self._journal.copies.get(request)
        return copy if copy is not None and _is_abreast(copy) else None

    def won(self, copy: LiveRequest) -> None:
        """Let the copy replace its owner, which is withdrawn."""
        owner, copy.owner = copy.owner, None
        assert owner is not None
        del self._journal.copies[owner]
        self._placer.withdraw([owner])
        copy.drafts.periods.extendleft(reversed(owner.drafts.periods))
        copy.drafts.num_replans += owner.drafts.num_replans
        requests = owner.generation.requests
        requests[requests.index(owner)] = copy

    def _start(self, request: LiveRequest, at: Assignment, suspect: Worker) -> bool:
        """Start a race. Return False if no other worker takes the request."""
        copy = self._placer.copy(request)
        if copy is None or copy.assignment is None:
            return False
        seconds, tokens = alone_s(copy.assignment), copy.assignment.num_uncached
        self._spent_s += seconds
        self._spent_on[suspect] += seconds
        self._metrics.count("races_total")
        self._metrics.count("raced_tokens_total", by=tokens)
        self._metrics.count("raced_seconds_total", by=seconds)
        raced = request.request_id, " and ".join(at.worker_ids.values())
        runner = copy.request_id, " and ".join(copy.worker_ids.values())
        logger.info("request %s of %s races as %s on %s", *raced, *runner, extra=ids(request))
        return True

    def _can_pay(self, budget_s: float) -> bool:
        was_spent, self._is_spent = self._is_spent, self._spent_s >= budget_s
        if self._is_spent and not was_spent:
            self._metrics.count("races_unpaid_total")
            logger.warning("no further races: copies have taken %.1f s of the workers' time", self._spent_s)
        return not self._is_spent

    def _suspect_of(self, request: LiveRequest, at: Assignment) -> Worker | None:
        """Return the suspect worker from which the next token, or a block needed for it, is due."""
        awaited: list[Worker | None] = [*at.holders]
        if at.stage is Stage.PREFILL:
            awaited = [at.first, self._registry.current_of(request.prefix)]
        return next((each for each in awaited if each is not None and each.is_suspect), None)

    def _is_complete(self, request: LiveRequest) -> bool:
        model = self._registry.model
        return request.end(model.eos_token_ids if model is not None else ()) is not None


def _is_abreast(copy: LiveRequest) -> bool:
    """Return whether the copy continues at the current end of the answer."""
    return copy.num_emitted_before == len(copy.output_token_ids)


ASK_AFTER_S = 1.0
"""[seconds] Silence before a question: many step times, and about as long as clients wait after a death."""


class RollCall:
    """The search for lost requests, which `lost` places again. Runs on the event loop only.

    A request is lost if a connection broke and took the message that brought the request to its worker, or
    the last message of its answer. The question uses the same connection as the former, and its reply the
    same as the latter, so a request with a message under way is never taken for lost.
    """

    def __init__(
        self, core: Core, loads: Loads, lost: Callable[[LiveRequest, Assignment, str], None]
    ) -> None:
        _, self._journal, self._registry, self._metrics, self._send = core
        self._loads = loads
        self._lost = lost

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
        self._lost(request, at, reason)
