"""What each place is expected to bring to those requests of a batch that are alike."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from math import isfinite
from operator import mul

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
from router.placement.drafts.interface import (
    NOWHERE,
    DraftFacts,
    DraftOption,
    DraftPlace,
    DraftTarget,
    SharedDrafter,
)
from router.placement.drafts.rates import (
    Rate,
    StepCurve,
    local_rate,
    plain_rate,
    reading_seconds,
    remote_rate,
)
from router.placement.drafts.seen import SeenRates

FIRST_RATES = [0.75] * 8
"""Acceptance where nothing is known, as the decode workers assume it too: what is tried is soon known, what
is not tried never."""
_UNKNOWN = MethodState(method="draft_model")
COUNTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
"""Ceilings that are compared elsewhere."""
ROOM = 0.01
"""[share] That a longer draft elsewhere may lose against the best: easy texts make it up."""
STAYS = 0.05
"""[share] The same for the ceiling that a request has."""


class Prospects:
    """Of a target's requests of one class that ask for the same, were all of its batch like them. What was
    `seen` of them corrects what is predicted.

    `why_none`: why they don't draft whatever it brings, if so; `may_stop`: whether they may be left without.
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
        self._curve = StepCurve(target)
        self._method = asked.method or target.method
        count = asked.num_speculative_tokens
        self._count = target.fixed_tokens if count is None else count
        self.may_stop = asked.method is None and self._count is None
        self.why_none = _why_none(asked, self._method, self._count)
        self._drafters = {each.worker_id: each for each in drafters if each.method == self._method}
        known = target.speculation or SpeculationState()
        self._most_tokens = known.max_tokens if self._method == target.method else 0
        states = {state.method: state for state in known.methods}
        self._local = states.get(self._method) if self._method is not None else None
        remote = states.get(REMOTE)
        self._local_chances = _survival(_tried(self._local, remote), request_class)
        self._remote_chances = _survival(_tried(remote, self._local), request_class)
        self._seen = seen or SeenRates()
        self._rates: dict[DraftPlace, Rate] = {}

    def nowhere(self, request: DraftFacts) -> DraftOption:
        return self._option(request, NOWHERE)

    def local(self, request: DraftFacts) -> DraftOption | None:
        """On the decode worker, which draws the line itself; None if it cannot draft so."""
        method = self._method
        if method is None or not (self._target.drafts_itself or method in WEIGHTLESS):
            return None
        return self._option(request, DraftPlace(method, self._count or self._most_tokens or MAX_TREE_NODES))

    def elsewhere(self, request: DraftFacts) -> list[DraftOption]:
        """On each draft worker."""
        return [self._on(request, drafter) for drafter in self._drafters.values()]

    # --- inside -------------------------------------------------------------------------------------

    def _on(self, request: DraftFacts, drafter: SharedDrafter) -> DraftOption:
        """With the longest draft that is about the best; what is so now stays."""
        longest = len(self._remote_chances)
        counts = [self._count] if self._count else [each for each in COUNTS if each < longest] + [longest]
        places = [DraftPlace(self._method, count, drafter.worker_id) for count in counts]
        best = max(self._rate(place).tokens_per_s for place in places)
        current = request.current
        if current in places and self._rate(current).tokens_per_s >= (1 - STAYS) * best:
            return self._option(request, current)
        good = [place for place in places if self._rate(place).tokens_per_s >= (1 - ROOM) * best]
        return self._option(request, good[-1])

    def _option(self, request: DraftFacts, place: DraftPlace) -> DraftOption:
        rate = self._rate(place)
        worth = self._worth(request, place, rate)
        is_seen = self._seen.knows(place.maker, self._rows)
        return DraftOption(
            place, rate.tokens_per_s, worth, rate.tokens_per_step, self._correction(place), is_seen
        )

    def _correction(self, place: DraftPlace) -> float:
        return self._seen.correction(place.maker, self._rows)

    def _rate(self, place: DraftPlace) -> Rate:
        """0 tokens a second if that cannot be told."""
        found = self._rates.get(place)
        if found is None:
            found = self._model(place)
            if not (isfinite(found.tokens_per_s) and found.tokens_per_s > 0):
                found = Rate(0.0, 1.0)
            found = found._replace(tokens_per_s=found.tokens_per_s * self._correction(place))
            self._rates[place] = found
        return found

    def _model(self, place: DraftPlace) -> Rate:
        if place.method is None:
            return plain_rate(self._rows, self._curve)
        if place.at is not None:
            drafter, chances = self._drafters[place.at], self._remote_chances[: place.max_tokens]
            return remote_rate(self._rows, self._curve, chances, drafter)
        if self._count is not None:
            return self._local_model(self._count)
        counts = range(1, len(self._local_chances) + 1)
        return max((self._local_model(count) for count in counts), key=lambda rate: rate.tokens_per_s)

    def _local_model(self, count: int) -> Rate:
        """A tree, or lookahead's window, is drafted as a whole: it has more tokens than levels."""
        state, chances, whole = self._local or _UNKNOWN, self._local_chances, self._most_tokens
        if len(chances) < whole:
            return local_rate(self._rows, self._curve, state, chances, whole, levels=1)
        return local_rate(self._rows, self._curve, state, chances[:count], count, levels=count)

    def _worth(self, request: DraftFacts, place: DraftPlace, rate: Rate) -> float:
        """Its tokens a second, less what is lost until the drafter has read the request's text."""
        current, per_s = request.current, rate.tokens_per_s
        has_read = current is not None and (current.method, current.at) == (place.method, place.at)
        if place.method is None or has_read or per_s <= 0:
            return per_s
        tokens_left = max(request.tokens_left, 1.0)
        if place.at is None:  # the batch stands still meanwhile, for each of its requests
            reading_s = request.num_tokens * self._local.read_s if self._local is not None else 0.0
            return per_s / (1 + per_s * reading_s / tokens_left)
        late_s = reading_seconds(self._drafters[place.at], request.num_tokens)
        share = min(late_s * per_s / (self._rows * tokens_left), 1.0)
        return per_s - share * (per_s - self._rate(NOWHERE).tokens_per_s)


def _why_none(asked: RequestSpeculation, method: Method | None, count: int | None) -> str:
    if not asked.enabled or asked.num_speculative_tokens == 0:
        return "the client wants no drafts"
    return "the deployment has no drafts" if method is None or count == 0 else ""


def _tried(state: MethodState | None, other: MethodState | None) -> MethodState | None:
    """What has not drafted yet is taken to be like the other, which has the same draft model."""
    tells_more = other is not None and other.by_class and not (state is not None and state.by_class)
    return other if tells_more else state


def _survival(state: MethodState | None, request_class: RequestClass) -> list[float]:
    """For each position of a draft the chance that it is accepted up to there; by class if that is known."""
    rates = (state.by_class.get(request_class) or state.acceptance) if state is not None else []
    return list(accumulate(rates or FIRST_RATES, mul))
