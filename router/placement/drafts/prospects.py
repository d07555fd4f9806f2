"""Predicts the tokens a second that each place for drafts brings to a decode worker's whole batch, and
chooses the best. The decode worker chooses in each step how many tokens each request's draft has.

`costs.drafting` predicts from step times, acceptance and load. Predictions are corrected by the latest
observations. For a single request, the time that its drafter needs to read its text is subtracted.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import exp, isfinite, log2
from operator import mul
from typing import Literal, NamedTuple

from costs.acceptance import FIRST_RATE
from costs.drafting import (
    Rate,
    SharedDrafter,
    StepCurve,
    local_rate,
    plain_rate,
    reading_seconds,
    remote_rate,
)
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


class DraftMaker(NamedTuple):
    """The worker that drafts: none without a `method`, the decode worker without `at`."""

    method: Method | None = None
    at: str | None = None

    @property
    def where(self) -> DraftSite:
        if self.method is None:
            return "none"
        return "local" if self.at is None else "remote"


class DraftPlace(NamedTuple):
    """The worker that drafts up to `max_tokens` in a step. No worker drafts without a `method`; the decode
    worker drafts without `at`, else the draft worker `at` does.
    """

    method: Method | None = None
    max_tokens: int = 0
    at: str | None = None

    @property
    def where(self) -> DraftSite:
        return self.maker.where

    @property
    def maker(self) -> DraftMaker:
        return DraftMaker(self.method, self.at)


NOWHERE = DraftPlace()


@dataclass(frozen=True, slots=True)
class DraftFacts:
    """A request, with `num_tokens` so far, that is expected to generate `tokens_left` more.

    It drafts at `current` now; None: it begins, and others like it draft with `others`. If `trial` is set,
    all of them are to draft with it for a while, to measure it.
    """

    num_tokens: int = 0
    tokens_left: float = 128.0
    current: DraftPlace | None = None
    others: DraftMaker | None = None
    trial: DraftMaker | None = None


@dataclass(frozen=True, slots=True)
class DraftTarget:
    """A decode worker that runs `rows` requests with `context_tokens` in all.

    By default it drafts with `method` (None: not at all) and `fixed_tokens` in each step (None: as many as
    pay). `drafts_itself` says that it has what drafting needs.
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

    `rate`: tokens a second of the batch. `worth`: the same over the rest of the request, less the time until
    its drafter has read its text. Both include `correction`, the ratio of observed to predicted.
    `tokens_per_step` is of one request. `is_seen`: it was observed at about this load.
    """

    place: DraftPlace
    rate: float
    worth: float
    tokens_per_step: float
    correction: float = 1.0
    is_seen: bool = False


@dataclass(frozen=True, slots=True)
class DraftDecision:
    chosen: DraftOption
    options: Sequence[DraftOption] = ()
    reason: str = ""

    @property
    def place(self) -> DraftPlace:
        return self.chosen.place


MIN_GAIN = 0.05
"""[share] The gain that a change must bring: about twice the uncertainty of a step's time."""
SEEN_GAIN = 0.02
"""[share] The same if both were observed: that is an average of seconds."""
FIRST_RATES = [FIRST_RATE] * 8
"""The acceptance to assume before any was measured, the same as the decode workers assume."""
_UNKNOWN = MethodState(method="draft_model")


class Prospects:
    """Predictions for requests of one decode worker, class and wishes, as if its whole batch were like them.

    `wants_none`: they never draft; `may_stop`: they may be left without drafts.
    """

    def __init__(
        self,
        target: DraftTarget,
        drafters: Sequence[SharedDrafter] = (),
        asked: RequestSpeculation | None = None,
        request_class: RequestClass = "greedy",
        seen: SeenRates | None = None,
    ) -> None:
        asked = asked or RequestSpeculation()
        self._target, self._rows = target, max(target.rows, 1.0)
        known = target.speculation or SpeculationState()
        self._curve = StepCurve(target.rows, known.step_time, target.costs, target.context_tokens)
        self._method = asked.method or target.method
        count = asked.num_speculative_tokens
        self._count = target.fixed_tokens if count is None else count
        """None: as many as pay."""
        self.wants_none = not asked.enabled or self._method is None or self._count == 0
        self.may_stop = asked.method is None and self._count is None
        self._drafters = {each.worker_id: each for each in drafters if each.method == self._method}
        is_deployed = self._method == target.method
        self._most_tokens = known.max_tokens if is_deployed else 0
        states = {state.method: state for state in known.methods}
        self._local = states.get(self._method) if self._method is not None else None
        # Draft workers use the deployment's method too, so their measured acceptance counts for all.
        self._chances = _survival(self._local, states.get(REMOTE) if is_deployed else None, request_class)
        self._seen = seen or SeenRates()
        self._rates: dict[DraftPlace, Rate] = {}

    def nowhere(self, request: DraftFacts) -> DraftOption:
        return self._option(request, NOWHERE)

    def local(self, request: DraftFacts) -> DraftOption | None:
        """Return the option of drafting on the decode worker; None if it cannot draft with the method."""
        if not (self._target.drafts_itself or self._method in WEIGHTLESS):
            return None
        return self._option(request, self._place())

    def elsewhere(self, request: DraftFacts) -> list[DraftOption]:
        """Return the options of drafting on each draft worker."""
        return [self._option(request, self._place(at)) for at in self._drafters]

    # --- inside -------------------------------------------------------------------------------------

    def _place(self, at: str | None = None) -> DraftPlace:
        return DraftPlace(self._method, self._count or self._most_tokens or MAX_TREE_NODES, at)

    def _option(self, request: DraftFacts, place: DraftPlace) -> DraftOption:
        rate = self._rate(place)
        worth = self._worth(request, place, rate.tokens_per_s)
        is_seen = self._seen.knows(place.maker, self._rows)
        return DraftOption(
            place, rate.tokens_per_s, worth, rate.tokens_per_step, self._correction(place), is_seen
        )

    def _correction(self, place: DraftPlace) -> float:
        return self._seen.correction(place.maker, self._rows)

    def _rate(self, place: DraftPlace) -> Rate:
        """Return the place's rate; 0 tokens a second if there is no sound prediction."""
        found = self._rates.get(place)
        if found is None:
            found = self._predicted(place)
            if not (isfinite(found.tokens_per_s) and found.tokens_per_s > 0):
                found = Rate(0.0, 1.0)
            found = found._replace(tokens_per_s=found.tokens_per_s * self._correction(place))
            self._rates[place] = found
        return found

    def _predicted(self, place: DraftPlace) -> Rate:
        """Predict the rate with the requested number of tokens, else with the best one."""
        if place.method is None:
            return plain_rate(self._rows, self._curve)
        counts = [self._count] if self._count else range(1, len(self._chances) + 1)
        drafter = self._drafters[place.at] if place.at is not None else None
        return max(self._drafting(count, drafter) for count in counts)

    def _drafting(self, count: int, drafter: SharedDrafter | None) -> Rate:
        """Predict the rate of drafts of `count` tokens; trees are drafted as a whole."""
        chances, whole = self._chances[:count], self._most_tokens
        if drafter is not None:
            return remote_rate(self._rows, self._curve, chances, drafter)
        state = self._local or _UNKNOWN
        if len(self._chances) < whole:
            return local_rate(self._rows, self._curve, state, self._chances, whole, levels=1)
        return local_rate(self._rows, self._curve, state, chances, count, levels=count)

    def _worth(self, request: DraftFacts, place: DraftPlace, per_s: float) -> float:
        """Return the place's tokens a second, less the loss until the drafter has read the request's text."""
        has_read = request.current is not None and request.current.maker == place.maker
        if place.method is None or has_read or per_s <= 0:
            return per_s
        tokens_left = max(request.tokens_left, 1.0)
        if place.at is None:  # the batch stands still meanwhile, for each of its requests
            reading_s = request.num_tokens * self._local.read_s if self._local is not None else 0.0
            return per_s / (1 + per_s * reading_s / tokens_left)
        # The request goes on without drafts meanwhile.
        late_s = reading_seconds(self._drafters[place.at], request.num_tokens)
        share = min(late_s * per_s / (self._rows * tokens_left), 1.0)
        return per_s - share * (per_s - self._rate(NOWHERE).tokens_per_s)


def _survival(
    local: MethodState | None, remote: MethodState | None, request_class: RequestClass
) -> list[float]:
    """Return the chance that a draft is accepted up to each position: the class's own, else that of all."""
    states = [state for state in (local, remote) if state is not None]
    known = [state.by_class.get(request_class) for state in states] + [state.acceptance for state in states]
    return list(accumulate(next(filter(None, known), FIRST_RATES), mul))


def decide(request: DraftFacts, prospects: Prospects) -> DraftDecision:
    """Return where the request drafts, by the prospects of requests like it. Never raises."""
    nowhere = prospects.nowhere(request)
    if prospects.wants_none:
        return DraftDecision(nowhere, (nowhere,), "no drafts are asked for")
    local, elsewhere = prospects.local(request), prospects.elsewhere(request)
    may_stop = prospects.may_stop or (local is None and not elsewhere)
    found = (nowhere if may_stop else None, local, *elsewhere)
    options = tuple(option for option in found if option is not None)
    tried = next((option for option in options if option.place.maker == request.trial), None)
    if tried is not None:
        return DraftDecision(tried, options, "a trial, to see what it brings")
    best, held = max(options, key=lambda option: option.worth), _held(request, options, local)
    if held is not None:
        least_gain = SEEN_GAIN if held.is_seen and best.is_seen else MIN_GAIN
        if best.worth <= held.worth * (1 + least_gain):
            return DraftDecision(held, options, "nothing brings clearly more")
    return DraftDecision(best, options, "it brings the most")


def _held(
    request: DraftFacts, options: tuple[DraftOption, ...], local: DraftOption | None
) -> DraftOption | None:
    """Return the option that only a clear gain replaces: the others' place, its own, or the decode worker."""
    now = request.others
    if now is None and request.current is not None:
        now = request.current.maker
    return next((option for option in options if option.place.maker == now), local if now is None else None)


MEMORY_S = 8.0
"""[seconds of the worker] The time constant of the average: texts differ, and a host has phases."""
LEAST_S = 0.25
"""[seconds of the worker] The least observation that counts."""
LEAST_RATIO = 0.01
"""The ratio of a worker that stood still: a number to divide by."""
MOST_ROWS = 2.0**20
"""Loads from here on count as one, infinite ones too."""


class _Sums(NamedTuple):
    """Sums over seconds of the worker: of the ratio of observed to predicted, and of 1.

    Sums in tokens would keep requests away for minutes after a prediction that was far too high. One that was
    far too low brings requests there, and fades.
    """

    ratios: float = 0.0
    seconds: float = 0.0


class SeenRates:
    """Rates of requests that are alike, relative to the predictions, by draft maker and load. Reads no clock.

    Predictions miss what their parts take from each other, such as shared cores, and are based on
    measurements at a start-up that may have been busy.
    """

    def __init__(self) -> None:
        self._sums: defaultdict[DraftMaker, dict[int, _Sums]] = defaultdict(dict)

    def note(self, place: DraftMaker, rows: float, seconds: float, seen: float, predicted: float) -> None:
        """Note that one of `rows` requests got `seen` tokens in `seconds` instead of `predicted`."""
        if not (isfinite(predicted) and predicted > 0):
            return
        share = seconds / rows
        by_load = self._sums[place]
        before, kept = by_load.get(load_of(rows), _Sums()), exp(-share / MEMORY_S)
        by_load[load_of(rows)] = _Sums(
            kept * before.ratios + share * seen / predicted, kept * before.seconds + share
        )

    def knows(self, place: DraftMaker, rows: float) -> bool:
        """Return whether the place was observed at about this load."""
        return _at(self._sums.get(place, {}), load_of(rows)) is not None

    def correction(self, place: DraftMaker, rows: float) -> float:
        """Return the factor for a prediction, observed at the nearest load."""
        load, by_load = load_of(rows), self._sums.get(place, {})
        known = [each for each in by_load if _at(by_load, each) is not None]
        nearest = min(known, key=lambda each: abs(each - load), default=load)
        return _at(by_load, nearest) or 1.0


def _at(by_load: Mapping[int, _Sums], load: int) -> float | None:
    sums = by_load.get(load)
    if sums is None or sums.seconds < LEAST_S:
        return None
    return max(sums.ratios / sums.seconds, LEAST_RATIO)


def load_of(rows: float) -> int:
    """Return the class of a load: loads within about half a doubling count as one."""
    return round(2 * log2(min(max(1.0, rows), MOST_ROWS)))
