"""Assignment of requests to workers by the placement policy; requests without a worker are parked."""

from __future__ import annotations

import logging
import time
from collections import defaultdict, deque
from collections.abc import Iterable
from dataclasses import replace

from protocol.roles import Task
from protocol.router_to_worker import Abort, Generate
from router.dispatch import Core
from router.dispatch.draft_planner import DraftPlanner
from router.dispatch.kv_feed import KvFeed
from router.dispatch.send_ahead import SendAhead
from router.observe.metrics import Metrics
from router.placement import PlacementPolicy
from router.placement.cluster import Cluster
from router.placement.decision import PlacementDecision
from router.placement.interface import Placement, PolicyState, Refusal, RequestFacts
from router.placement.predict import refusal as slo_refusal
from router.requests.journal import LiveRequest
from router.workers.assignment import Assignment, DemandMeter, Loads, Stage
from router.workers.registry import Worker

logger = logging.getLogger(__name__)

FIRST_OUTPUT = 128.0
"""[tokens] Mean length of an answer to assume before any request has ended."""
OUTPUT_PACE = 0.05
"""Weight of each ended request in the mean length of answers."""
MAX_REDIRECTS = 3
"""Number of decode workers that may fail to take over a request before its prefill worker decodes it."""


class Placer:
    """Placement of requests, on the event loop only.

    If no worker can serve a request, it is parked in the journal as long as a worker is starting. Parked
    requests are placed in order of arrival. While further workers are starting, the ready ones get only
    enough requests to fill their batches, so that the first worker to come back does not get all of them.
    """

    def __init__(self, core: Core, policy: PlacementPolicy, kv_feed: KvFeed) -> None:
        self._config, self._journal, self._registry, self._metrics, self._send = core
        self._policy = policy
        self._kv_feed = kv_feed
        self._parked: dict[LiveRequest, None] = {}
        self._missing: Task | None = None
        self._state = PolicyState()
        self._mean_output = FIRST_OUTPUT
        self.loads = Loads(core.registry)
        self.meter = DemandMeter()
        self.ahead = SendAhead(core, self._transmit, lambda: self._mean_output)
        self.decisions = DecisionLog(core.metrics)
        self.drafts = DraftPlanner(core, self._tokens_left)

    def place(self, request: LiveRequest, *, checks_slo: bool = False) -> Refusal | None:
        """Add the request to the journal and send or park it. Return a refusal if no worker will serve it.

        With `checks_slo` a request that is expected to miss its SLO is refused too.
        """
        request.start_placement()
        self._journal.add(request)
        refusal = None if self._parked else self._offer(request, checks_slo)
        if self._parked or (refusal is not None and not refusal.missed and self._registry.awaited()):
            self._park(request)
            return None
        if refusal is not None:
            self._journal.remove(request)
        return refusal

    def copy(self, request: LiveRequest) -> LiveRequest | None:
        """Send a copy of the request to other workers. Return None if no worker takes the copy now."""
        copy = request.copy()
        copy.start_placement()
        self._journal.add(copy)
        if self._parked or self._offer(copy) is not None:
            self._journal.remove(copy)
            return None
        self._journal.copies[request] = copy
        return copy

    def resume(self) -> tuple[LiveRequest, Refusal] | None:
        """Place parked requests while there is room. Return one that no worker will ever serve, if any."""
        while self._parked:
            request = next(iter(self._parked))
            refusal = self._offer(request)
            if refusal is not None and self._registry.awaited():
                return None
            self._unpark(request)
            if refusal is not None:
                return request, refusal
        return None

    def withdraw(self, requests: Iterable[LiveRequest]) -> None:
        """Remove unfinished requests and their copies from the journal, and abort them on their workers."""
        both = [each for request in requests for each in (request, self._journal.copies.get(request))]
        unfinished = [each for each in both if each is not None and self._journal.remove(each)]
        self.abort(request for request in unfinished if request.stage is not Stage.HELD)
        for request in unfinished:
            self._unpark(request)
            self._release(request)

    def abort(self, requests: Iterable[LiveRequest]) -> None:
        by_worker: dict[Worker, list[str]] = defaultdict(list)
        for request in requests:
            for worker in request.assignment.holders if request.assignment is not None else ():
                by_worker[worker].append(request.request_id)
        for worker, request_ids in by_worker.items():
            self._send(worker, Abort(request_ids=request_ids))

    def next_decode(self, request: LiveRequest, prefill: Worker, again: Worker | None) -> Worker:
        """Return the next decode worker: one that has not failed, the only one `again`, or `prefill`."""
        if request.redirects >= MAX_REDIRECTS:
            return prefill
        decodes = self._decodes()
        others = [worker for worker in decodes if worker.key.incarnation not in request.failed]
        if again is not None and decodes == [again]:
            others = decodes
        return self._choose(request, others) or prefill

    def other_decode(self, request: LiveRequest, leaves: Worker) -> Worker | None:
        """Return another worker that can continue to decode the request of `leaves`, if any."""
        other = self._choose(request, self._decodes())
        return None if other is leaves else other

    def _decodes(self) -> list[Worker]:
        return [worker for worker in self._registry.live() if worker.role.purpose == "decode"]

    def _choose(self, request: LiveRequest, workers: list[Worker]) -> Worker | None:
        """Return the decode worker, of `workers`, for a request; None if there are none."""
        workers = [worker for worker in workers if not worker.is_suspect] or workers
        cluster = Cluster(worker.load for worker in workers)
        name = self._policy.next_decode(self._facts(request), cluster, self._state)
        return None if name is None else self._registry.named(name)

    def move(self, request: LiveRequest, target: Worker) -> bool:
        """Place the request on `target`. Return False if `target` cannot be reached: place it again then."""
        self.withdraw([request])
        request.start_placement()
        self._journal.add(request)
        placement = Placement({"decode": target.key.worker_id})
        return self.ahead.offer(request, self._assign(request, placement, self._facts(request)))

    def answered(self, request: LiveRequest, at: Assignment, now: float) -> None:
        """Record that the placement's first token has arrived."""
        if not request.first_token_time:
            ttft_s = now - request.generation.arrival
            self.meter.answered(at, ttft_s, request.generation.slo_ttft_s)
        self.loads.answered(at)
        self.ahead.free(at)
        self.decisions.answered(request, now)

    def finished(self, request: LiveRequest, now: float) -> None:
        """Record that the request has all its tokens."""
        self.decisions.finished(request, now)
        others, at = request.choice.num_tokens - 1, request.current
        if others > 0 and at is not None:
            tpot_s = (now - request.first_token_time) / others
            self.meter.finished(at.decode, tpot_s, request.generation.slo_tpot_s)
        self._mean_output += OUTPUT_PACE * (len(request.output_token_ids) - self._mean_output)
        self._release(request)

    @property
    def num_parked(self) -> int:
        return len(self._parked)

    def _park(self, request: LiveRequest) -> None:
        if not self._parked:
            awaited = ", ".join(self._registry.awaited())
            logger.warning("no worker can take requests: they wait for %s", awaited or "their turn")
        self._parked[request] = None
        request.times.park()
        self._metrics.count("requests_parked_total")

    def _unpark(self, request: LiveRequest) -> None:
        if request not in self._parked:
            return
        del self._parked[request]
        request.times.unpark()
        if not self._parked:
            logger.info("no request waits for a worker any more")

    def _has_room(self) -> bool:
        limit = self._config.max_num_seqs
        return any(worker.outstanding_requests < limit for worker in self._registry.live())

    def _offer(self, request: LiveRequest, checks_slo: bool = False) -> Refusal | None:
        """Send the request to the workers that the policy names, or to others if these are unreachable."""
        if self._parked and self._registry.awaited() and not self._has_room():
            return Refusal("every ready worker is busy")
        unreachable: Refusal | None = None
        began = time.monotonic()
        while True:
            facts = self._facts(request)
            placement, self._state = self._policy.place(facts, self._registry.cluster, self._state)
            if isinstance(placement, Refusal):
                return unreachable or placement
            late = self._late(request, facts, placement) if checks_slo else None
            if late is not None:
                return late
            at = self._assign(request, placement, facts)
            assigned = time.monotonic()  # the time until here counts as placement, after it as waiting
            if self.ahead.offer(request, at):
                request.times.placement_s += assigned - began
                is_split = "prefill" in placement.workers
                self._metrics.count("placements_total", "disaggregated" if is_split else "colocated")
                self.decisions.placed(request, facts, placement)
                self._note_fallback(placement)
                return None
            at.first.is_reachable = False
            self._registry.changed(at.first)
            unreachable = Refusal(f"worker {at.first.key.worker_id} cannot be reached")
            self._release(request)

    def _late(self, request: LiveRequest, facts: RequestFacts, placement: Placement) -> Refusal | None:
        """Return why the request is expected to miss its SLO although it overtakes others; else None."""
        first = self._registry.named(next(iter(placement.workers.values())))
        share, predicted = self.ahead.overtaken_share(request, first), placement.predicted
        if share > 0 and predicted is not None:
            facts = replace(facts, waited_s=facts.waited_s - share * predicted.queue_s)
        return slo_refusal(facts, self._registry.cluster, placement)

    def _facts(self, request: LiveRequest) -> RequestFacts:
        before = request.assignment
        holder = before.first if before is not None and before.first.role.purpose == "prefill" else None
        holds = holder is not None and holder.live and holder.key.incarnation not in request.failed
        computes_all = request.sampling.prompt_logprobs is not None
        return RequestFacts(
            num_tokens=request.num_prefill_tokens,
            output_tokens=self._tokens_left(request),
            mean_output_tokens=self._mean_output,
            disaggregate=self._config.disaggregation,
            prefix_at=holder.key.worker_id if holder is not None and holds else None,
            cached_tokens={} if computes_all else self._kv_feed.cached_tokens(request),
            session=request.generation.session,
            avoid=self._registry.named_by(request.failed) if request.failed else frozenset(),
            split=request.generation.split,
            waited_s=time.monotonic() - request.generation.arrival,
            slo_ttft_s=request.generation.slo_ttft_s,
            slo_tpot_s=request.generation.slo_tpot_s,
        )

    def _tokens_left(self, request: LiveRequest) -> float:
        """Return the number of tokens that the request is still expected to generate."""
        return min(request.sampling.max_tokens - len(request.output_token_ids), self._mean_output)

    def _assign(self, request: LiveRequest, placement: Placement, facts: RequestFacts) -> Assignment:
        workers = [self._registry.named(name) for name in placement.workers.values()]
        request.prefix = placement.prefix
        uncached = facts.num_uncached(placement.source)
        at = self.loads.assign(workers[0], workers[-1], facts.num_tokens, uncached)
        request.assignment = at
        self.meter.placed(at)
        request.cost = request.cost or at.num_uncached + facts.output_tokens
        self.drafts.plan(request, at)
        return at

    def _release(self, request: LiveRequest) -> None:
        """End the request's assignment: its workers serve it no more."""
        at = request.current
        if at is not None:
            self.drafts.end(request, at)
            self.ahead.forget(request, at)
            self.loads.release(at)

    def _transmit(self, request: LiveRequest, at: Assignment) -> bool:
        now = time.monotonic()
        fetch_from = self._registry.current_of(request.prefix)
        message = Generate(
            incarnation=at.first.key.incarnation,
            request=request.engine_request(max(request.generation.deadline - now, 0.0)),
            decode=at.decode.address if at.prefill is not None else None,
            prefix=fetch_from.address if fetch_from is not None else None,
        )
        if not self._send(at.first, message):
            return False
        request.times.placed_at = now
        self.loads.sent(at)
        return True

    def _note_fallback(self, placement: Placement) -> None:
        """Count requests that one worker serves alone because no other role is left. Log each change."""
        missing = placement.missing
        if missing not in self._registry.known_purposes:
            missing = None
        if missing is not None:
            self._metrics.count("role_fallbacks_total", missing)
        if missing != self._missing:
            if missing is not None:
                logger.warning("no %s worker is left: the others serve whole requests", missing)
            else:
                logger.warning("there is a %s worker again", self._missing)
            self._missing = missing


MAX_DECISIONS = 1000
"""Number of decisions to keep: some hundred kilobytes."""


class DecisionLog:
    """The latest decisions. Runs on the event loop only."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._decisions: deque[PlacementDecision] = deque(maxlen=MAX_DECISIONS)

    def latest(self, count: int) -> list[PlacementDecision]:
        """Return up to `count` decisions, the newest first."""
        return list(self._decisions)[::-1][:count]

    def placed(self, request: LiveRequest, facts: RequestFacts, placement: Placement) -> None:
        request.decision = PlacementDecision(request.request_id, facts, placement, request.drafts)
        self._decisions.append(request.decision)

    def answered(self, request: LiveRequest, now: float) -> None:
        """Record that the placement's first token has come."""
        decision = request.decision
        if decision is not None:
            decision.observed_ttft_s = now - decision.placed_at
            if decision.placement.predicted is not None:
                predicted_s = decision.placement.predicted.ttft_s
                self._metrics.predicted("ttft", predicted_s, decision.observed_ttft_s)

    def finished(self, request: LiveRequest, now: float) -> None:
        decision = request.decision
        tokens = len(request.output_token_ids) - request.num_emitted_before - 1
        if decision is None or decision.observed_ttft_s is None or tokens < 1:
            return
        decision.observed_tpot_s = (now - decision.placed_at - decision.observed_ttft_s) / tokens
        if decision.placement.predicted is not None:
            predicted_s = decision.placement.predicted.tpot_s(decision.facts.output_tokens)
            self._metrics.predicted("tpot", predicted_s, decision.observed_tpot_s)
