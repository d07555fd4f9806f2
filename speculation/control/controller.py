"""Decides for each step how many tokens its requests draft.

A plan stands for some steps, whose time and tokens are measured as a whole: a step in which nobody drafts
costs little more than a comparison. Plans depend on committed tokens only, never on drafted ones: whether a
token is verified must not depend on the token.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from protocol.speculation import Source, SpeculationState
from speculation.control.estimator import Estimator
from speculation.control.explorer import Explorer
from speculation.control.planner import Plan, SpeculatingRequest, StepCost, add_fixed, best_plan
from speculation.control.settings import Settings


class DraftController:
    """For the engine's thread; `report` from any. Deterministic, given the clock."""

    def __init__(self, max_sequences: int, max_tokens: int, settings: Settings | None = None) -> None:
        """`max_tokens`: the most that one draft has."""
        self._settings = settings or Settings()
        self.estimator = Estimator(max_sequences, max_tokens, self._settings)
        self._explorer = Explorer(self._settings)
        self._load = 0, 0
        """Requests that decode, and that will soon."""
        self._steps_left = 0
        """For which the present plan stands."""
        self._pays: dict[int, bool] = {}
        """Whether typical requests would draft, by the number of bits of how many there are."""
        self._is_idle = False
        """Whether nobody drafts by the present plan, nor would a typical request."""
        self.drafts = False
        """Whether anybody does by the present plan."""
        self._sees = False
        """Whether anybody's prompt was read, by a method that must not miss a step after that."""

    def begin_step(self, num_decoding: int, num_to_come: int = 0) -> bool:
        """Whether to `plan` the coming step; otherwise the present plan stands. Plans are made as if the
        requests to come did decode: what was read of their prompts is lost where drafting then doesn't pay.
        """
        before, self._load = self._load, (num_decoding, num_to_come)
        has_come = num_decoding > before[0] or num_to_come != before[1]
        if self._steps_left <= 0 or (has_come and self._may_pay()):
            return num_decoding > 0
        self._steps_left -= 1
        window = self.estimator.window
        if num_decoding != before[0] or window is None:
            self.end_window()
            self.estimator.begin_window(num_decoding)
        else:
            window.next_step(time.perf_counter())
        return False

    def join(self, request: SpeculatingRequest, *, is_read: bool) -> None:
        """A request joins, to which the present plan grants nothing. `is_read`: its prompt was, elsewhere.

        Where drafting doesn't pay at this load the plan stands: a new request is as likely to draft well as
        any other.
        """
        if request.fixed_tokens is not None or is_read or self._may_pay():
            self._steps_left = 0

    def _may_pay(self) -> bool:
        return not self._is_idle or self._pays.get(sum(self._load).bit_length(), True)

    def end_window(self) -> None:
        """Learn from the steps since the latest plan. To be called when the engine has no more to do."""
        if (found := self.estimator.end_window()) is not None:
            tokens, seconds = found
            self._explorer.passed(seconds, tokens)

    @property
    def reads_steps(self) -> bool:
        """Whether what a step without drafts computes may be read by a later draft."""
        return self.drafts or self._sees or self._steps_left <= 0

    def reads_prompts(self, method: Source, num_tokens: int) -> bool:
        """Whether so many tokens of prompts, prefilled in this step, are to be read for drafting."""
        size = sum(self._load)
        pays = self._pays.get(size.bit_length())
        if pays is None:
            pays = self._typical_pays(method, size)
        reads = pays or self._explorer.buys(self.estimator.read_seconds(method, num_tokens))
        if reads:
            self._steps_left = 0
        return reads

    def plan(self, requests: Sequence[SpeculatingRequest]) -> None:
        """Set `granted` of all requests that decode in the coming step."""
        self.end_window()
        self._explorer.end_trial()
        groups: dict[Source, list[SpeculatingRequest]] = {}
        most = 0
        for request in requests:
            request.granted = request.fixed_tokens or 0
            if request.method is not None:
                request.acceptance.age(request.place)
                groups.setdefault(request.method, []).append(request)
                shape = self.estimator.methods[request.method].shape
                most += shape.max_tokens if request.fixed_tokens is None else request.granted
        step = self.estimator.step_cost(len(requests) + self._load[1], most)
        for method, group in groups.items():
            if fixed := [request for request in group if request.granted]:
                cost = self.estimator.draft_cost(method, len(fixed))
                step = add_fixed(self.estimator.methods[method].shape, cost, fixed, step)
        self._steps_left, self._is_idle = self._settings.idle_stands, True
        for method, group in groups.items():
            if free := [request for request in group if request.fixed_tokens is None]:
                step = self._plan_free(method, free, step)
        for method, known in self.estimator.methods.items():
            group = groups.get(method, [])
            known.num_requests, known.num_tokens = len(group), sum([request.granted for request in group])
        self.drafts = any(request.granted for request in requests)
        self._sees = any(
            request.method is not None
            and self.estimator.methods[request.method].reads_prompts
            and not request.is_blind
            for request in requests
        )
        self._steps_left -= 1
        self.estimator.begin_window(len(requests))

    def _plan_free(self, method: Source, requests: list[SpeculatingRequest], step: StepCost) -> StepCost:
        """Grant tokens to those that draft as many as pay, or for a trial. Returns the step with them."""
        settings, size = self._settings, sum(self._load)
        plain = Plan([0] * len(requests), step, step.rate)
        best = self._best(method, requests, step)
        pays = best is not None and best.rate > plain.rate * (1 + settings.min_gain)
        self._pays[size.bit_length()] = pays or self._typical_pays(method, size)
        stands = settings.plain_stands if self._pays[size.bit_length()] else settings.idle_stands
        chosen, other = plain, best if self._shows_something(method, requests) else None
        if pays and best is not None:
            chosen, other, stands = best, plain, settings.draft_stands
        if other is not None:
            price = self._price(method, requests, other, chosen)
            if self._explorer.tries(price, chosen.rate):
                chosen, stands = other, settings.trial_steps
        self._is_idle &= stands == settings.idle_stands
        self._steps_left = min(self._steps_left, stands)
        for request, granted in zip(requests, chosen.granted, strict=True):
            request.granted = granted
        return chosen.step

    def _best(self, method: Source, requests: list[SpeculatingRequest], step: StepCost) -> Plan | None:
        shape = self.estimator.methods[method].shape
        return best_plan(shape, self.estimator.draft_cost(method, len(requests)), requests, step)

    def _shows_something(self, method: Source, requests: list[SpeculatingRequest]) -> bool:
        """Whether anything can be learned from their drafts: not if none of their prompts was read."""
        return not (self.estimator.methods[method].reads_prompts and all(r.is_blind for r in requests))

    def _price(self, method: Source, requests: list[SpeculatingRequest], trial: Plan, instead: Plan) -> float:
        """Seconds that a trial is expected to lose."""
        settings = self._settings
        unread = sum(
            [request.unread for request, granted in zip(requests, trial.granted, strict=True) if granted]
        )
        lost = max(1 - trial.rate / instead.rate, settings.min_gain)
        return settings.trial_steps * trial.step.seconds * lost + self.estimator.read_seconds(method, unread)

    def _typical_pays(self, method: Source, num_requests: int) -> bool:
        """Whether so many requests would draft, the prompts of which are to be read first."""
        known, typical = self.estimator.methods[method], self.estimator.new_request(method, None)
        typical.unread = int(self.estimator.mean_prompt) if known.reads_text else 0
        step = self.estimator.step_cost(num_requests, num_requests * known.shape.max_tokens)
        best = self._best(method, [typical] * num_requests, step)
        return best is not None and best.rate > step.rate * (1 + self._settings.min_gain)

    def report(self, max_tokens: int) -> SpeculationState:
        """`max_tokens`: the most that a request drafts by the deployment's configuration."""
        methods, step_time = self.estimator.report()
        return SpeculationState(max_tokens=max_tokens, methods=methods, step_time=step_time)
