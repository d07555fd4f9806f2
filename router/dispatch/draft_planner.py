"""Plans where each request's drafts are made, and plans again as load changes and draft workers come and
go.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Literal

import msgspec

from costs.drafting import SharedDrafter
from protocol.config import ServeConfig
from protocol.router_to_worker import PeerGone, Replan
from protocol.speculation import RequestClass, RequestSpeculation
from router.observe.metrics import Metrics
from router.placement.drafts.interface import (
    DraftDecision,
    DraftFacts,
    DraftOption,
    DraftPlace,
    DraftSite,
    DraftTarget,
)
from router.placement.drafts.kinds import DraftKind, expect
from router.placement.drafts.prospects import Prospects, decide
from router.placement.drafts.seen import SeenRates
from router.requests.journal import Journal, LiveRequest
from router.workers.registry import Registry, Worker

logger = logging.getLogger(__name__)

SWEEP_S = 0.005
"""The time after which a sweep stops; the next one continues there."""
CANDIDATES = 2
"""The number of least loaded draft workers that are compared with the one that similar requests use."""

Cause = Literal["load", "lost"]
_Key = tuple[Worker, RequestSpeculation | None, RequestClass]


class DraftPlanner:
    """Plans drafts. Runs on the event loop only. `tokens_left` returns the tokens that a request is expected
    to generate yet.
    """

    def __init__(
        self,
        config: ServeConfig,
        journal: Journal,
        registry: Registry,
        metrics: Metrics,
        send: Callable[[Worker, msgspec.Struct], bool],
        tokens_left: Callable[[LiveRequest], float],
    ) -> None:
        self._where: Literal["cost"] | DraftSite = config.draft_placement
        self._max_rows = config.max_num_seqs
        self._deployed = config.speculative_config
        self._journal = journal
        self._registry = registry
        self._metrics = metrics
        self._send = send
        self._tokens_left = tokens_left
        self._prospects: dict[_Key, tuple[object, Prospects]] = {}
        self._kinds: defaultdict[_Key, DraftKind] = defaultdict(lambda: DraftKind(metrics.draft_tried))
        self._drafting: Counter[tuple[Worker, Worker]] = Counter()
        """The number of requests that the first worker decodes and the second drafts for."""
        self._next = 0
        """The place in the journal where the next sweep continues."""

    def plan(self, request: LiveRequest) -> None:
        """Plan a request that was assigned to workers but not sent to them yet."""
        asked = request.generation.speculation
        if self._deployed is None and (asked is None or asked.method is None):
            return
        decision = self._decide(request, None)
        self._adopt(request, decision)
        self._expect(request, decision.chosen, since=0.0)
        self._metrics.draft_planned(decision.place.where)

    def sweep(self) -> None:
        """Reconsider running requests. To be called a few times a second."""
        self._prospects.clear()
        requests, began = list(self._journal), time.monotonic()
        first = self._next if self._next < len(requests) else 0
        self._next = 0
        for index, request in enumerate(requests[first:], first):
            if time.monotonic() - began > SWEEP_S:
                self._next = index
                break
            self._reconsider(request)

    def leave(self, worker: Worker) -> None:
        """Stop using a worker that was lost or is about to leave. Requests that draft on it draft
        elsewhere.
        """
        for key in [key for key in self._kinds if key[0] is worker]:
            del self._kinds[key]
        for request in self._journal if worker.role.purpose == "draft" else ():
            if request.drafts_by is not None:
                self._reconsider(request)

    def lost(self, worker: Worker) -> None:
        """Handle a worker that died or fell silent. Draft workers free what they hold for it."""
        self.leave(worker)
        if worker.role.holds_draft:
            return
        name, gone = worker.key
        for drafter in self._registry:
            if drafter.role.holds_draft:
                at = drafter.key.incarnation
                self._send(drafter, PeerGone(incarnation=at, worker_id=name, gone=gone))

    # --- inside -------------------------------------------------------------------------------------

    def _reconsider(self, request: LiveRequest) -> None:
        current, decode = request.drafts.place, request.assigned.get("decode")
        if current is None or decode is None or "prefill" in request.assigned or not request.has_answered:
            return  # its decode worker does not have it yet
        self._follow(request, decode)
        cause: Cause = "load"
        if request.drafts_by is not None and not self._is_there(request.drafts_by[1]):
            cause = "lost"
        now = time.monotonic()
        self._learn(request, now)
        decision = self._decide(request, current)
        if decision.place == current and cause == "load":
            self._expect(request, decision.chosen, since=now)
            return
        self._adopt(request, decision)
        message = Replan(
            incarnation=decode.key.incarnation, request_id=request.request_id, plan=request.draft_plan
        )
        if not self._send(decode, message):
            return  # the worker is about to be lost, with all that it runs
        request.drafts.num_replans += 1
        self._metrics.draft_replanned(cause)
        if logger.isEnabledFor(logging.DEBUG):
            logger.debug(
                "request %s drafts %s instead of %s (%s): %s",
                request.request_id,
                _described(decision.place),
                _described(current),
                cause,
                decision.reason,
            )

    def _follow(self, request: LiveRequest, decode: Worker) -> None:
        """Follow a request that was handed off to another decode worker than the planned one."""
        pair = request.drafts_by
        if pair is not None and pair[0] is not decode:
            self._count(pair, -1, -request.num_tokens_given)
            request.drafts_by = decode, pair[1]
            self._count(request.drafts_by, 1, request.num_tokens_given)

    def _is_there(self, drafter: Worker) -> bool:
        return drafter.takes_requests and self._registry.current(*drafter.key) is drafter

    def _decide(self, request: LiveRequest, current: DraftPlace | None) -> DraftDecision:
        kind, asked = self._kind(request), request.generation.speculation
        facts = DraftFacts(
            num_tokens=len(request.choice.prompt.token_ids) + len(request.output_token_ids),
            tokens_left=self._tokens_left(request),
            current=current,
        )
        prospects = self._prospects_of(request, kind.seen)
        where = asked.place if asked is not None and asked.place is not None else self._where
        return kind.decide(facts, prospects) if where == "cost" else _forced(decide(facts, prospects), where)

    def _kind(self, request: LiveRequest) -> DraftKind:
        return self._kinds[_key(request)]

    def _expect(self, request: LiveRequest, option: DraftOption, since: float) -> None:
        rows = self._target(request.assigned["decode"]).rows
        num_tokens = max(len(request.output_token_ids), request.num_emitted_before + 1)
        request.expected = expect(option, rows, since, num_tokens)

    def _learn(self, request: LiveRequest, now: float) -> None:
        """Learn from the tokens that the request got since the last call."""
        expected, request.expected = request.expected, None
        if expected is not None and request.has_answered:
            rows, num_tokens = self._target(request.assigned["decode"]).rows, len(request.output_token_ids)
            self._kind(request).note(expected, request.times.answered_at, num_tokens, rows, now)

    def _adopt(self, request: LiveRequest, decision: DraftDecision) -> None:
        self.end(request)
        decode, at = request.assigned["decode"], decision.place.at
        if at is not None:
            request.drafts_by = decode, self._registry.named(at)
            request.num_tokens_given = request.num_prefill_tokens
            self._count(request.drafts_by, 1, request.num_tokens_given)
        request.drafts.begin_period(decision, decode.key.worker_id, request.draft_counts)

    def end(self, request: LiveRequest) -> None:
        """End the request's current draft period: it drafts no more, or elsewhere."""
        self._learn(request, request.last_token_time)
        pair, request.drafts_by = request.drafts_by, None
        if pair is not None:
            self._count(pair, -1, -request.num_tokens_given)
        period = request.drafts.end_period(request.draft_counts)
        if period is not None and period.counts.steps:
            counts = period.counts
            predicted = period.decision.chosen.tokens_per_step * counts.steps
            self._metrics.drafts_made(period.decision.place.where, counts.steps, predicted, counts.tokens)

    def _count(self, pair: tuple[Worker, Worker], requests: int, tokens: int) -> None:
        self._drafting[pair] += requests
        if not self._drafting[pair]:
            del self._drafting[pair]
        drafter = pair[1]
        drafter.outstanding_requests += requests
        drafter.outstanding_rows += requests
        drafter.outstanding_context += tokens
        self._registry.changed(drafter)

    # --- estimates --------------------------------------------------------------------------------

    def _prospects_of(self, request: LiveRequest, seen: SeenRates) -> Prospects:
        """Return the prospects of requests like this one, computed once per sweep unless the load changes."""
        decode, asked, request_class = key = _key(request)
        target, drafters = self._target(decode), self._drafters(decode, request)
        load = target.rows, [(each.worker_id, each.others) for each in drafters]
        known = self._prospects.get(key)
        if known is None or known[0] != load:
            known = self._prospects[key] = (
                load,
                Prospects(target, drafters, asked, request_class, seen),
            )
        return known[1]

    def _target(self, decode: Worker) -> DraftTarget:
        load, deployed = decode.load, self._deployed
        return DraftTarget(
            rows=min(load.rows, self._max_rows),
            context_tokens=load.context_tokens,
            costs=load.costs,
            speculation=decode.state.speculation,
            method=deployed.method if deployed is not None else None,
            fixed_tokens=deployed.fixed_tokens if deployed is not None else None,
            drafts_itself=deployed is not None and deployed.decode_workers_draft,
        )

    def _drafters(self, decode: Worker, request: LiveRequest) -> list[SharedDrafter]:
        if self._deployed is None or decode.role.purpose != "decode":
            return []
        names = [load.worker_id for load in self._registry.cluster.least_loaded("draft", CANDIDATES)]
        maker = self._kind(request).maker
        used = self._registry.current_of(maker.at) if maker is not None else None
        if used is not None and used.takes_requests:
            names.append(used.key.worker_id)
        return [self._drafter(decode, self._registry.named(name)) for name in dict.fromkeys(names)]

    def _drafter(self, decode: Worker, drafter: Worker) -> SharedDrafter:
        assert self._deployed is not None
        load, known = drafter.load, decode.state.speculation
        answers = known.draft_answers if known is not None else {}
        return SharedDrafter(
            worker_id=drafter.key.worker_id,
            method=self._deployed.method,
            costs=load.costs,
            others=max(load.requests - self._drafting[decode, drafter], 0),
            context_tokens=load.context_tokens / load.rows if load.rows > 0 else 0.0,
            waiting_tokens=load.prefill_tokens,
            answer_s=answers.get(drafter.key.worker_id, 0.0),
        )


def _key(request: LiveRequest) -> _Key:
    request_class: RequestClass = "greedy" if request.sampling.is_greedy else "sampled"
    return request.assigned["decode"], request.generation.speculation, request_class


def _forced(decision: DraftDecision, where: DraftSite) -> DraftDecision:
    """Return the best option at the place that the operator demands, if there is one."""
    options = [option for option in decision.options if option.place.where == where]
    if not options:
        return decision
    chosen = max(options, key=lambda option: option.worth)
    return DraftDecision(chosen, decision.options, f"drafts are to be made: {where}")


def _described(place: DraftPlace) -> str:
    return (
        "nowhere" if place.method is None else f"up to {place.max_tokens} on {place.at or 'its own worker'}"
    )
