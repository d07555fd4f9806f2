"""Decisions where a request's drafts are made, by the tokens a second that a decode worker's batch gains.

In each step the decode worker chooses how many tokens each request's draft has. `costs.drafting` predicts the
rate from step times, acceptance and load; the latest observations correct the prediction. For a single
request, the time that its drafter needs to read the request's text is subtracted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from math import exp, isfinite, log2
from operator import mul
from typing import Literal, NamedTuple

from costs import drafting
from protocol.costs import UNKNOWN_COSTS, StepCosts
from protocol.speculation import (
    MAX_TREE_NODES,
    REMOTE,
    WEIGHTLESS,
    Method,
    MethodState,
    RequestClass,
    RequestSpeculation,
    SpeculationState,
)

DraftSite = Literal["none", "local", "remote"]


class DraftPlace(NamedTuple):
    """The worker that drafts: the draft worker `at`, or the decode worker if None. No `method`: no drafts."""

    method: Method | None = None
    at: str | None = None

    @property
    def where(self) -> DraftSite:
        if self.method is None:
            return "none"
        return "local" if self.at is None else "remote"


NOWHERE = DraftPlace()


@dataclass(frozen=True, slots=True)
class DraftFacts:
    """Facts about a request that has `num_tokens` tokens and is expected to generate `tokens_left` more.

    `current`: the place where it drafts now; None: it has no plan yet. `others`: the place that similar
    requests use.
    """

    num_tokens: int = 0
    tokens_left: float = 128.0
    current: DraftPlace | None = None
    others: DraftPlace | None = None


@dataclass(frozen=True, slots=True)
class DraftTarget:
    """Facts about a decode worker that runs `rows` requests with `context_tokens` in all.

    By default it drafts with `method` (None: not at all) and `fixed_tokens` in each step (None: as many as
    pay). `drafts_itself`: whether it has the weights that drafting needs.
    """

    rows: float = 1.0
    context_tokens: float = 0.0
    costs: StepCosts = UNKNOWN_COSTS
    speculation: SpeculationState | None = None
    method: Method | None = None
    fixed_tokens: int | None = None
    drafts_itself: bool = True


class DraftOption(NamedTuple):
    """The prediction for a place if all requests of the batch drafted there.

    `rate`: tokens a second of the batch. `worth`: the rate over the rest of the request, less the time in
    which its drafter reads its text. Both include `correction`, the ratio of observed to predicted rate.
    `tokens_per_step`: tokens of one request in a step. `max_tokens`: most draft tokens of one in a step.
    """

    place: DraftPlace
    rate: float
    worth: float
    tokens_per_step: float
    max_tokens: int = 0
    correction: float = 1.0


@dataclass(frozen=True, slots=True)
class DraftDecision:
    chosen: DraftOption
    options: Sequence[DraftOption] = ()
    reason: str = ""

    @property
    def place(self) -> DraftPlace:
        return self.chosen.place


MIN_GAIN = 0.05
"""[share] Gain that justifies a change of place: about twice the uncertainty of a step's time."""
FIRST_RATES = [drafting.FIRST_RATE] * 8
"""Acceptance rates to assume before any was measured; decode workers assume the same."""
_UNKNOWN = MethodState(method="draft_model")


class Prospects:
    """Predictions for similar requests of one decode worker, as if its whole batch were like them.

    `wants_none`: the requests never draft. `may_stop`: they may run without drafts.
    """

    def __init__(
        self,
        target: DraftTarget,
        drafters: Sequence[drafting.SharedDrafter] = (),
        asked: RequestSpeculation | None = None,
        request_class: RequestClass = "greedy",
        seen: SeenRates | None = None,
    ) -> None:
        asked = asked or RequestSpeculation()
        self._target, self._rows = target, max(target.rows, 1.0)
        known = target.speculation or SpeculationState()
        self._curve = drafting.StepCurve(target.rows, known.step_time, target.costs, target.context_tokens)
        self._method = asked.method or target.method
        count = asked.num_speculative_tokens
        self._count = target.fixed_tokens if count is None else count
        """Draft tokens in each step; None: as many as pay."""
        is_off = not asked.enabled or asked.place == "none"
        self.wants_none = is_off or self._method is None or self._count == 0
        self.may_stop = asked.method is None and self._count is None
        self._drafters = {each.worker_id: each for each in drafters if each.method == self._method}
        is_deployed = self._method == target.method
        self._most_tokens = known.max_tokens if is_deployed else 0
        states = {state.method: state for state in known.methods}
        self._local = states.get(self._method) if self._method is not None else None
        # Draft workers use the deployment's method too, so the acceptance of their drafts counts for all.
        self._chances = _survival(self._local, states.get(REMOTE) if is_deployed else None, request_class)
        self._seen = seen or SeenRates()
        self._rates: dict[DraftPlace, drafting.Rate] = {}

    def nowhere(self, request: DraftFacts) -> DraftOption:
        return self._option(request, NOWHERE)

    def local(self, request: DraftFacts) -> DraftOption | None:
        """Return the option of drafting on the decode worker; None if it lacks the method's weights. Unless a
        number of tokens is fixed, the worker drafts nothing while that does not pay.
        """
        if not (self._target.drafts_itself or self._method in WEIGHTLESS):
            return None
        option, plain = self._option(request, DraftPlace(self._method)), self.nowhere(request)
        if self._count is None and plain.worth > option.worth:
            return plain._replace(place=option.place, max_tokens=option.max_tokens)
        return option

    def elsewhere(self, request: DraftFacts) -> list[DraftOption]:
        return [self._option(request, DraftPlace(self._method, at)) for at in self._drafters]

    def _option(self, request: DraftFacts, place: DraftPlace) -> DraftOption:
        rate, most = self._rate(place), self._count or self._most_tokens or MAX_TREE_NODES
        return DraftOption(
            place,
            rate.tokens_per_s,
            self._worth(request, place, rate.tokens_per_s),
            rate.tokens_per_step,
            most if place.method is not None else 0,
            self._seen.correction(place, self._rows),
        )

    def _rate(self, place: DraftPlace) -> drafting.Rate:
        """Return the place's corrected rate; 0 tokens a second unless the prediction is positive, finite."""
        found = self._rates.get(place)
        if found is None:
            found = self._predicted(place)
            if not (isfinite(found.tokens_per_s) and found.tokens_per_s > 0):
                found = drafting.Rate(0.0, 1.0)
            correction = self._seen.correction(place, self._rows)
            found = found._replace(tokens_per_s=found.tokens_per_s * correction)
            self._rates[place] = found
        return found

    def _predicted(self, place: DraftPlace) -> drafting.Rate:
        """Predict the rate with the requested number of draft tokens, else with the best number."""
        if place.method is None:
            return drafting.plain_rate(self._rows, self._curve)
        counts = [self._count] if self._count else range(1, len(self._chances) + 1)
        drafter = self._drafters[place.at] if place.at is not None else None
        return max(self._drafting(count, drafter) for count in counts)

    def _drafting(self, count: int, drafter: drafting.SharedDrafter | None) -> drafting.Rate:
        """Predict the rate with drafts of `count` tokens. A tree is always drafted whole."""
        chances, whole = self._chances[:count], self._most_tokens
        if drafter is not None:
            return drafting.remote_rate(self._rows, self._curve, chances, drafter)
        state = self._local or _UNKNOWN
        if len(self._chances) < whole:
            return drafting.local_rate(self._rows, self._curve, state, self._chances, whole, levels=1)
        return drafting.local_rate(self._rows, self._curve, state, chances, count, levels=count)

    def _worth(self, request: DraftFacts, place: DraftPlace, per_s: float) -> float:
        """Return the rate of the batch, less what it loses until the drafter has read the request's text."""
        has_read = request.current is not None and request.current == place
        if place.method is None or has_read or per_s <= 0:
            return per_s
        tokens_left = max(request.tokens_left, 1.0)
        if place.at is None:  # the whole batch waits meanwhile
            reading_s = request.num_tokens * self._local.read_s if self._local is not None else 0.0
            return per_s / (1 + per_s * reading_s / tokens_left)
        # Until the drafter has read its text, the request runs without drafts.
        late_s = drafting.reading_seconds(self._drafters[place.at], request.num_tokens)
        share = min(late_s * per_s / (self._rows * tokens_left), 1.0)
        return per_s - share * (per_s - self._rate(NOWHERE).tokens_per_s)


def _survival(
    local: MethodState | None, remote: MethodState | None, request_class: RequestClass
) -> list[float]:
    """Return the chance that a draft is accepted up to each position: by request class if known."""
    states = [state for state in (local, remote) if state is not None]
    known = [state.by_class.get(request_class) for state in states] + [state.acceptance for state in states]
    return list(accumulate(next(filter(None, known), FIRST_RATES), mul))


def decide(request: DraftFacts, prospects: Prospects) -> DraftDecision:
    """Return where the request drafts, given the prospects of similar requests. Never raises."""
    nowhere = prospects.nowhere(request)
    if prospects.wants_none:
        return DraftDecision(nowhere, (nowhere,), "no drafts are asked for")
    local, elsewhere = prospects.local(request), prospects.elsewhere(request)
    may_stop = prospects.may_stop or (local is None and not elsewhere)
    found = (nowhere if may_stop else None, local, *elsewhere)
    options = tuple(option for option in found if option is not None)
    choices = options
    if local is not None:  # a worker without drafts would never learn that they pay by now
        choices = tuple(option for option in options if option.place != NOWHERE)
    best, held = max(choices, key=lambda option: option.worth), _held(request, choices, local)
    if held is not None and best.worth <= held.worth * (1 + MIN_GAIN):
        return DraftDecision(held, options, "nothing brings clearly more")
    return DraftDecision(best, options, "it brings the most")


def _held(
    request: DraftFacts, options: tuple[DraftOption, ...], local: DraftOption | None
) -> DraftOption | None:
    """Return the option to keep unless another is clearly better: the others', its own, or the local one."""
    now = request.others or request.current
    return next((option for option in options if option.place == now), local if now is None else None)


MEMORY_S = 8.0
"""[seconds of decoding] Time constant of the average: texts differ, and hosts have slow periods."""
LEAST_S = 0.25
"""[seconds of decoding] Least observed time that counts."""
FORGOTTEN_S = 100.0
"""[seconds of decoding] Time after which a place that is no longer used is predicted as if it was never
observed: it may have been slow for a moment only. To find it slow again takes about a second.
"""
LEAST_RATIO = 0.01
"""Least correction, for a worker that stood still: predictions are divided by it."""
MOST_ROWS = 2.0**20
"""Largest load with a class of its own; larger and infinite loads count as this one."""


class _Sums(NamedTuple):
    """Sums, weighted by seconds of decoding, of the ratio of observed to predicted tokens, and of 1. `until`:
    the seconds of decoding, of all places and loads, until the last observation.

    Sums of tokens would give a prediction that was far too high the most weight, and keep requests away for
    minutes. A prediction that was far too low attracts requests, and its error then fades.
    """

    ratios: float = 0.0
    seconds: float = 0.0
    until: float = 0.0


class SeenRates:
    """Ratios of observed to predicted rate for similar requests, by place and load. Reads no clock.

    Predictions ignore how the workers slow each other down, for example on shared cores, and use step times
    measured at start-up, when the host may have been busy. A place that brought less than predicted loses to
    others. It is used again once these do worse than that, or once its observations are forgotten.
    """

    def __init__(self) -> None:
        self._sums: dict[tuple[DraftPlace, int], _Sums] = {}
        self._passed_s = 0.0

    def note(self, place: DraftPlace, rows: float, seconds: float, seen: float, predicted: float) -> None:
        """Record that one of `rows` requests got `seen` tokens in `seconds`; `predicted` were expected."""
        if not (isfinite(predicted) and predicted > 0):
            return
        share = seconds / rows
        before, kept = self._known(place, rows), exp(-share / MEMORY_S)
        self._passed_s += share
        self._sums[place, load_of(rows)] = _Sums(
            kept * before.ratios + share * seen / predicted, kept * before.seconds + share, self._passed_s
        )

    def correction(self, place: DraftPlace, rows: float) -> float:
        """Return the factor that corrects a prediction, as observed at about this load; 1 if it was not."""
        sums = self._known(place, rows)
        return max(sums.ratios / sums.seconds, LEAST_RATIO) if sums.seconds >= LEAST_S else 1.0

    def _known(self, place: DraftPlace, rows: float) -> _Sums:
        sums = self._sums.get((place, load_of(rows)), _Sums())
        return sums if self._passed_s < sums.until + FORGOTTEN_S else _Sums()


def load_of(rows: float) -> int:
    """Return the class of a load. Loads within a factor of about the square root of two share a class."""
    return round(2 * log2(min(max(1.0, rows), MOST_ROWS)))


class ExpectedTokens(NamedTuple):
    """Expected output of one of `rows` requests: `per_s` tokens a second after `num_tokens` at `since`."""

    place: DraftPlace
    rows: float
    per_s: float
    since: float
    num_tokens: int


class DraftKind:
    """The requests of one decode worker and class with equal settings. All use one `place` if that pays."""

    def __init__(self) -> None:
        self.seen = SeenRates()
        self.place: DraftPlace | None = None

    def decide(self, facts: DraftFacts, prospects: Prospects) -> DraftDecision:
        decision = decide(replace(facts, others=self.place), prospects)
        self.place = decision.place
        return decision

    def note(
        self, expected: ExpectedTokens, answered_at: float, num_tokens: int, rows: float, now: float
    ) -> None:
        """Learn from a request, first answered at `answered_at`, with `num_tokens` now in a batch of `rows`.

        The rate is ignored if the batch has changed: one planned as the only request gains less among 16.
        """
        seconds = now - max(expected.since, answered_at)
        if seconds > 0 and load_of(rows) == load_of(expected.rows):
            tokens = num_tokens - expected.num_tokens
            self.seen.note(expected.place, expected.rows, seconds, tokens, expected.per_s * seconds)


def expect(option: DraftOption, rows: float, since: float, num_tokens: int) -> ExpectedTokens:
    """Return the output expected of one of `rows` requests that all draft at the option's place."""
    rows = max(rows, 1.0)
    return ExpectedTokens(option.place, rows, option.rate / (option.correction * rows), since, num_tokens)
