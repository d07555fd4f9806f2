"""The choice of how many tokens each request drafts, so that a step commits the most tokens per second.

A plan holds for several steps, whose time is measured as a whole: a step without drafts costs little more
than a comparison. Plans depend on committed tokens only, never on draft tokens: whether a token is verified
must not depend on the token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from costs.drafting import MIN_GAIN, TRIAL_SHARE, Explorer
from protocol.speculation import Source
from speculation.control.estimator import Estimator, MethodEstimate, SpeculatingRequest

DRAFT_PLAN_STEPS = 8
"""[steps] The duration of a plan that drafts: planning takes 5 % of a 0.4 ms step."""
PLAIN_PLAN_STEPS = 16
"""[steps] The duration of a plan without drafts, if a request whose text is not hard would draft."""
IDLE_PLAN_STEPS = 64
"""[steps] The duration of a plan if not even such a request would draft, or all numbers are fixed."""
TRIAL_STEPS = 6
"""[steps] The duration of a trial: enough to outweigh its first step, which runs with cold caches."""


class DraftController:
    """The planner of drafts, for the engine's thread only. It is deterministic, given the clock."""

    def __init__(self, max_sequences: int, max_tokens: int, trial_share: float = TRIAL_SHARE) -> None:
        self.estimator = Estimator(max_sequences, max_tokens)
        self._explorer = Explorer(trial_share)
        self._load = 0, 0
        """The number of requests that decode, and of those that will decode soon."""
        self._steps_left = 0
        """The number of steps for which the present plan still holds."""
        self._fixed_to_come = False
        """Whether a request with a fixed number of tokens may be among those that will decode soon."""
        self._pays: dict[int, bool] = {}
        """Whether typical requests would draft, by the bit length of their number."""
        self.drafts = False
        """Whether any request drafts under the present plan."""
        self._has_read_prompts = False
        """Whether any prompt was read by a method that must not miss a step after that."""

    def begin_step(self, num_decoding: int, num_to_come: int = 0) -> bool:
        """Return whether to `plan` the coming step; otherwise the present plan holds. Plans count requests to
        come as decoding: if drafting then doesn't pay, what was read of their prompts is lost.
        """
        before, load = self._load, (num_decoding, num_to_come)
        is_due = self._is_due(load)
        self._load = load
        self._fixed_to_come &= num_to_come > 0
        if num_decoding == 0:
            self.end_window()
            return False
        if is_due:
            return True
        self._steps_left -= 1
        window = self.estimator.window
        if num_decoding != before[0] or window is None:
            self.end_window()
            self.estimator.begin_window(num_decoding)
        else:
            window.steps += 1
        return False

    def _is_due(self, load: tuple[int, int]) -> bool:
        has_come = load[0] > self._load[0] or load[1] != self._load[1]
        return self._steps_left <= 0 or (has_come and (self._fixed_to_come or self._may_pay(load)))

    def may_go_ahead(self, num_decoding: int, num_to_come: int, reads_hidden: bool) -> bool:
        """Return whether no request drafts in the coming step and the present plan holds for it. With
        `reads_hidden`, the step's hidden states must not be needed either: see `reads_steps`.
        """
        if self.drafts or self._is_due((num_decoding, num_to_come)):
            return False
        return not (reads_hidden and (self._has_read_prompts or self._steps_left == 1))

    def went_ahead(self, num_decoding: int, num_to_come: int) -> None:
        """Record that the coming step was launched under the present plan, and plan the next if due."""
        if self.begin_step(num_decoding, num_to_come):
            self.end_window()
            self._steps_left = 0

    def join(self, request: SpeculatingRequest, *, is_read: bool) -> None:
        """Add a request, which the present plan grants nothing. `is_read`: another worker read its prompt.

        If drafting doesn't pay at this load the plan still holds: a new request is as likely to draft well as
        any other.
        """
        self._fixed_to_come |= bool(request.fixed_tokens)
        if request.fixed_tokens is not None or is_read or self._may_pay():
            self._steps_left = 0

    def _may_pay(self, load: tuple[int, int] | None = None) -> bool:
        return self._pays.get(sum(load or self._load).bit_length(), True)

    def end_window(self) -> None:
        """Learn from the steps since the latest plan. Also to be called when the engine runs out of work."""
        self._explorer.passed(self.estimator.end_window())

    @property
    def reads_steps(self) -> bool:
        """Whether a later draft may read what a step without drafts computes."""
        return self.drafts or self._has_read_prompts or self._steps_left <= 0

    def reads_prompts(self, method: Source, num_tokens: int) -> bool:
        """Return whether drafters are to read `num_tokens` prompt tokens that are prefilled in this step."""
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
        for request in requests:
            request.granted = request.fixed_tokens or 0
            request.acceptance.age(request.place)
        size = sum(self._load)
        fixed = [request for request in requests if request.granted]
        tokens = size + sum([sum(request.acceptance.survival()[: request.granted]) for request in fixed])
        step = PlannedStep(size, tokens, sum([request.granted for request in fixed]))
        self._steps_left = IDLE_PLAN_STEPS
        self._has_read_prompts = False
        for method, known in self.estimator.methods.items():
            group = [request for request in requests if request.method == method]
            if free := [request for request in group if request.fixed_tokens is None]:
                step = self._choose(method, free, step)
            known.num_requests, known.num_tokens = len(group), sum([request.granted for request in group])
            self._has_read_prompts |= known.reads_prompts and not all(request.is_blind for request in group)
        self.drafts = any(request.granted for request in requests)
        self._steps_left -= 1
        self.estimator.begin_window(len(requests))

    def _choose(self, method: Source, requests: list[SpeculatingRequest], step: PlannedStep) -> PlannedStep:
        """Grant the requests the tokens that pay, or those of a trial. Return the step with their drafts."""
        size = step.num_sequences
        plain, best = plain_and_best(self.estimator, method, requests, step)
        pays = _is_faster(best, plain)
        self._pays[size.bit_length()] = pays or self._typical_pays(method, size)
        if pays:
            chosen, other, num_steps = best, plain, DRAFT_PLAN_STEPS
        else:
            chosen, other, num_steps = plain, best, PLAIN_PLAN_STEPS if self._may_pay() else IDLE_PLAN_STEPS
        reads_prompts = self.estimator.methods[method].reads_prompts
        shows_something = not (reads_prompts and all(request.is_blind for request in requests))
        lost = max(1 - other.rate / chosen.rate, MIN_GAIN)
        if shows_something and self._explorer.tries(TRIAL_STEPS * other.seconds * lost):
            chosen, num_steps = other, TRIAL_STEPS
            drafting = zip(requests, other.granted, strict=True)
            unread = sum([request.unread for request, granted in drafting if granted])
            self._explorer.owes(self.estimator.read_seconds(method, unread))
        self._steps_left = min(self._steps_left, num_steps)
        for request, granted in zip(requests, chosen.granted, strict=True):
            request.granted = granted
        return chosen.step

    def _typical_pays(self, method: Source, num_requests: int) -> bool:
        """Return whether `num_requests` typical requests, whose prompts must be read first, would draft."""
        typical = self.estimator.new_request(method, None)
        if self.estimator.methods[method].reads_text:
            typical.unread = int(self.estimator.mean_prompt)
        step = PlannedStep(num_requests, num_requests)
        plain, best = plain_and_best(self.estimator, method, [typical] * num_requests, step)
        return _is_faster(best, plain)


def _is_faster(plan: Plan, other: Plan) -> bool:
    return plan.rate > other.rate * (1 + MIN_GAIN)


@dataclass(frozen=True, slots=True)
class PlannedStep:
    """A step of `num_sequences` sequences: its expected tokens, its draft rows, its seconds of drafting."""

    num_sequences: int
    tokens: float
    drafted: float = 0.0
    drafting: float = 0.0


@dataclass(frozen=True, slots=True)
class Plan:
    """A plan with `granted[i]` tokens for request i, and the resulting step; `rate` is tokens a second."""

    granted: list[int]
    step: PlannedStep
    seconds: float
    rate: float


def plain_and_best(
    estimator: Estimator, method: Source, requests: Sequence[SpeculatingRequest], step: PlannedStep
) -> tuple[Plan, Plan]:
    """Return plans without and with drafts of these requests of one method, added to the drafts of `step`.
    Both are the same if none of the requests can draft.

    Slots of all requests are filled in the order of their probability of survival, up to the greatest ratio
    of expected tokens to expected seconds (DSpark, arXiv 2607.05147; vLLM's adaptive verification).
    """
    known = estimator.methods[method]
    width, weight = known.shape.width, known.acceptance.found * known.shape.width
    chances = [_slot_chances(known, request) for request in requests]
    slots = sorted(
        (-chance, level, index) for index, all in enumerate(chances) for level, chance in enumerate(all, 1)
    )
    tokens, drafted, drafting, reading = [step.tokens], [step.drafted], [step.drafting], [0.0]
    read_share = estimator.read_seconds(method, 1) / estimator.mean_output
    unit, deepest = known.time.unit(len(requests)), 0
    for end, (rank, level, index) in enumerate(slots, 1):
        deepest = max(deepest, level)
        tokens.append(tokens[-1] - rank * weight)
        drafted.append(drafted[-1] + weight)
        drafting.append(step.drafting + unit * known.time.units(deepest, end * width))
        unread = requests[index].unread if level == 1 else 0
        reading.append(reading[-1] + read_share * unread * (1 + sum(chances[index]) * width))
    seconds = estimator.target.seconds(step.num_sequences, drafted) + drafting
    rates = tokens / (seconds + reading)

    def plan(end: int) -> Plan:
        granted = [0] * len(requests)
        for _, _, index in slots[:end]:
            granted[index] += width
        reached = PlannedStep(step.num_sequences, tokens[end], drafted[end], drafting[end])
        return Plan(granted, reached, float(seconds[end]), float(rates[end]))

    return plan(0), plan(1 + int(rates[1:].argmax()) if slots else 0)


def _slot_chances(known: MethodEstimate, request: SpeculatingRequest) -> list[float]:
    """Return the probability that each slot's tokens survive; for a tree the mean over its tokens."""
    survival, most = request.acceptance.survival(), known.shape.max_tokens
    if not known.shape.whole:
        return survival[: request.most]
    if request.most is not None and request.most < most:
        return []
    return [sum(survival) / max(known.acceptance.found * most, 1.0)]
