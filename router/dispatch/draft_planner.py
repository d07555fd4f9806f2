"""Plans of where each request's drafts are made, renewed when load or draft workers change."""

from __future__ import annotations

import logging
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Literal

from costs.drafting import SharedDrafter
from protocol.ids import PeerAddress
from protocol.router_to_worker import PeerGone, Replan
from protocol.speculation import RequestClass, RequestSpeculation
from router.dispatch import Core
from router.placement.decision import DraftPeriod
from router.placement.drafts import (
    DraftDecision,
    DraftFacts,
    DraftKind,
    DraftOption,
    DraftPlace,
    DraftSite,
    DraftTarget,
    Prospects,
    decide,
    expect,
)
from router.requests.journal import LiveRequest
from router.workers.assignment import Assignment, Stage
from router.workers.registry import Worker

logger = logging.getLogger(__name__)

SWEEP_S = 0.005
"""Duration of a sweep; the next sweep continues at the request where this one stopped."""
CANDIDATES = 2
"""Number of least loaded draft workers to compare with the one that similar requests use."""

Cause = Literal["load", "lost"]
_Key = tuple[Worker, RequestSpeculation | None, RequestClass]


class DraftPlanner:
    """Draft plans of all requests, on the event loop. `tokens_left` returns the tokens still expected."""

    def __init__(self, core: Core, tokens_left: Callable[[LiveRequest], float]) -> None:
        config, self._journal, self._registry, self._metrics, self._send = core
        self._where: Literal["cost"] | DraftSite = config.draft_placement
        self._max_rows = config.max_num_seqs
        self._deployed = config.speculative_config
        self._tokens_left = tokens_left
        self._prospects: dict[_Key, tuple[object, Prospects]] = {}
        self._kinds: defaultdict[_Key, DraftKind] = defaultdict(DraftKind)
        self._drafting: Counter[tuple[str, str]] = Counter()
        """Number of requests by their decode worker and draft worker."""
        self._next = 0
        """Index in the journal where the next sweep continues."""

    def plan(self, request: LiveRequest, at: Assignment) -> None:
        """Plan a request that was assigned to workers but not sent to them yet."""
        asked = request.generation.speculation
        if self._deployed is None and (asked is None or asked.method is None):
            return
        decision = self._decide(request, at, None)
        self._adopt(request, at, decision)
        self._expect(request, at, decision.chosen, since=0.0)
        self._metrics.count("draft_plans_total", decision.place.where)

    def sweep(self) -> None:
        """Reconsider running requests. To be called a few times a second."""
        self._prospects.clear()
        requests, began = self._journal.assigned(), time.monotonic()
        first = self._next if self._next < len(requests) else 0
        self._next = 0
        for index, (request, at) in enumerate(requests[first:], first):
            if time.monotonic() - began > SWEEP_S:
                self._next = index
                break
            self._reconsider(request, at)

    def leave(self, worker: Worker) -> None:
        """Stop using a draft worker that was lost or leaves. Its requests draft elsewhere."""
        for key in [key for key in self._kinds if key[0] is worker]:
            del self._kinds[key]
        for request, at in self._journal.assigned() if worker.role.purpose == "draft" else ():
            period = request.drafts.current
            if period is not None and period.at is not None:
                self._reconsider(request, at)

    def lost(self, worker: Worker) -> None:
        """Handle a worker that died or fell silent. Draft workers free its sequences."""
        self.leave(worker)
        if worker.role.holds_draft:
            return
        name, gone = worker.key
        for drafter in self._registry:
            if drafter.role.holds_draft:
                at = drafter.key.incarnation
                self._send(drafter, PeerGone(incarnation=at, worker_id=name, gone=gone))

    def _reconsider(self, request: LiveRequest, at: Assignment) -> None:
        period = request.drafts.current
        if period is None or at.stage is not Stage.DECODE:
            return  # its decode worker does not have it yet
        self._follow(period, at)
        current = period.decision.place
        cause: Cause = "lost" if period.at is not None and not self._is_there(period.at) else "load"
        now = time.monotonic()
        self._learn(request, at, period, now)
        decision = self._decide(request, at, current)
        if decision.place == current and cause == "load":
            self._expect(request, at, decision.chosen, since=now)
            return
        self._adopt(request, at, decision)
        plan, incarnation = request.drafts.plan, at.decode.key.incarnation
        message = Replan(incarnation=incarnation, request_id=request.request_id, plan=plan)
        if not self._send(at.decode, message):
            return  # the worker is about to be lost, with all that it runs
        request.drafts.num_replans += 1
        self._metrics.count("draft_replans_total", cause)
        if logger.isEnabledFor(logging.DEBUG):
            facts = request.request_id, decision.place, current, cause, decision.reason
            logger.debug("request %s drafts at %s instead of %s (%s): %s", *facts)

    def _follow(self, period: DraftPeriod, at: Assignment) -> None:
        """Adapt the period of a request whose hand-off went to another decode worker than planned."""
        name = at.decode.key.worker_id
        if period.worker_id != name:
            self._count(period, -1)
            period.worker_id = name
            self._count(period, 1)

    def _is_there(self, drafter: PeerAddress) -> bool:
        worker = self._registry.current(drafter.worker_id, drafter.incarnation)
        return worker is not None and worker.takes_requests

    def _decide(self, request: LiveRequest, at: Assignment, current: DraftPlace | None) -> DraftDecision:
        kind, asked = self._kinds[_key(request, at)], request.generation.speculation
        num_tokens = len(request.choice.prompt.token_ids) + len(request.output_token_ids)
        facts = DraftFacts(num_tokens, self._tokens_left(request), current=current)
        prospects = self._prospects_of(request, at, kind)
        where = asked.place if asked is not None and asked.place is not None else self._where
        return kind.decide(facts, prospects) if where == "cost" else _forced(decide(facts, prospects), where)

    def _expect(self, request: LiveRequest, at: Assignment, option: DraftOption, since: float) -> None:
        period = request.drafts.current
        if period is not None:
            num_tokens = max(len(request.output_token_ids), request.num_emitted_before + 1)
            rows = self._target(at.decode).rows
            period.expected = expect(option, rows, since, num_tokens)

    def _learn(self, request: LiveRequest, at: Assignment, period: DraftPeriod, now: float) -> None:
        """Learn from the tokens that the request got since the latest prediction."""
        expected, period.expected = period.expected, None
        if expected is not None and at.has_answered:
            rows, num_tokens = self._target(at.decode).rows, len(request.output_token_ids)
            self._kinds[_key(request, at)].note(expected, request.times.answered_at, num_tokens, rows, now)

    def _adopt(self, request: LiveRequest, at: Assignment, decision: DraftDecision) -> None:
        self.end(request, at)
        drafter = decision.place.at
        period = DraftPeriod(
            decision,
            at.decode.key.worker_id,
            self._registry.named(drafter).address if drafter is not None else None,
            at.num_tokens,
            request.draft_counts,
        )
        request.drafts.periods.append(period)
        self._count(period, 1)

    def end(self, request: LiveRequest, at: Assignment) -> None:
        """End the request's current draft period, because it stops drafting or drafts elsewhere."""
        period = request.drafts.current
        if period is None:
            return
        self._learn(request, at, period, request.last_token_time)
        self._count(period, -1)
        period.ended = request.draft_counts
        counts = period.counts
        if counts.steps:
            predicted = period.decision.chosen.tokens_per_step * counts.steps
            where = period.decision.place.where
            self._metrics.count("draft_plan_steps_total", where, by=counts.steps)
            self._metrics.count("draft_plan_predicted_tokens_total", where, by=predicted)
            self._metrics.count("draft_plan_observed_tokens_total", where, by=counts.tokens)

    def _count(self, period: DraftPeriod, sign: int) -> None:
        """Add `sign` to the load of the period's draft worker, if it has one."""
        if period.at is None:
            return
        pair = period.worker_id, period.at.worker_id
        self._drafting[pair] += sign
        if not self._drafting[pair]:
            del self._drafting[pair]
        drafter = self._registry.current(period.at.worker_id, period.at.incarnation)
        if drafter is not None:
            drafter.outstanding_requests += sign
            drafter.outstanding_rows += sign
            drafter.outstanding_context += sign * period.num_tokens
            self._registry.changed(drafter)

    def _prospects_of(self, request: LiveRequest, at: Assignment, kind: DraftKind) -> Prospects:
        """Return the prospects of requests like this one, computed once per sweep and load."""
        decode, asked, request_class = key = _key(request, at)
        target, drafters = self._target(decode), self._drafters(decode, kind)
        load = target.rows, [(each.worker_id, each.others) for each in drafters]
        known = self._prospects.get(key)
        if known is None or known[0] != load:
            prospects = Prospects(target, drafters, asked, request_class, kind.seen)
            known = self._prospects[key] = load, prospects
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

    def _drafters(self, decode: Worker, kind: DraftKind) -> list[SharedDrafter]:
        if self._deployed is None or decode.role.purpose != "decode":
            return []
        names = [load.worker_id for load in self._registry.cluster.least_loaded("draft", CANDIDATES)]
        used = self._registry.current_of(kind.place.at) if kind.place is not None else None
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
            others=max(load.requests - self._drafting[decode.key.worker_id, drafter.key.worker_id], 0),
            context_tokens=load.context_tokens / load.rows if load.rows > 0 else 0.0,
            waiting_tokens=load.prefill_tokens,
            answer_s=answers.get(drafter.key.worker_id, 0.0),
        )


def _key(request: LiveRequest, at: Assignment) -> _Key:
    request_class: RequestClass = "greedy" if request.sampling.is_greedy else "sampled"
    return at.decode, request.generation.speculation, request_class


def _forced(decision: DraftDecision, where: DraftSite) -> DraftDecision:
    """Return the best option at the place that the operator demands, if any."""
    options = [option for option in decision.options if option.place.where == where]
    if not options:
        return decision
    chosen = max(options, key=lambda option: option.worth)
    return DraftDecision(chosen, decision.options, f"drafts are to be made: {where}")
