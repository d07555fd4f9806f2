"""Predictions of the tokens per second of a decode worker's batch, by the place where its drafts are made,
and trials of options that seem worse, at a small share of the time: without trials nothing is learned.

S(i) is the probability that token i of a draft is accepted together with all tokens before it. A step that
verifies K draft tokens then yields tau = 1 + S(1) + ... + S(K) tokens for each request. With B requests it
takes T(K) seconds.

- Without drafts: B / T(0).
- Drafts made on the decode worker, between its steps: B tau / (T(K) + drafting).
- Drafts made on a draft worker while the decode worker computes. Only the share x of a request's steps finds
  a draft: B (1 + x (tau - 1)) / T(x K).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import isfinite
from typing import NamedTuple

from protocol.costs import UNKNOWN_COSTS, StepCosts
from protocol.speculation import Method, MethodState, StepTimeState

TRIAL_SHARE = 0.01
"""[share] The largest share of the time that trials may lose."""


class Explorer:
    """A budget of seconds, earned as a share of the time that passes; it saves for one trial at most. What a
    trial costs beyond its price is owed: the next trial waits until it is earned.
    """

    def __init__(self, share: float = TRIAL_SHARE) -> None:
        self._share, self._seconds = share, 0.0

    def passed(self, seconds: float) -> None:
        self._seconds += self._share * seconds

    def owes(self, seconds: float) -> None:
        self._seconds -= seconds

    def tries(self, price: float) -> bool:
        """Return whether to start a trial that is expected to lose `price` seconds; if so, spend them."""
        self._seconds = min(self._seconds, price)
        return self.buys(price)

    def buys(self, seconds: float) -> bool:
        """Spend `seconds` if the budget covers them; return whether it did."""
        if self._seconds < seconds:
            return False
        self._seconds -= seconds
        return True


@dataclass(frozen=True, slots=True)
class SharedDrafter:
    """A draft worker, from the point of view of one target.

    It drafts with `method` for `others` requests of other targets, each with `context_tokens`, and still has
    to read `waiting_tokens` of their texts. `answer_s` is the time from a target's message to the worker's
    answer, both between two of the target's steps; 0 if not measured.
    """

    worker_id: str
    method: Method
    costs: StepCosts = UNKNOWN_COSTS
    others: float = 0.0
    context_tokens: float = 0.0
    waiting_tokens: float = 0.0
    answer_s: float = 0.0


MIN_GAIN = 0.03
"""[share] The least gain in speed that makes drafting worthwhile: about the uncertainty of a step's time."""


class Rate(NamedTuple):
    """The token rate of a batch, and the tokens that a step yields for each of its requests."""

    tokens_per_s: float
    tokens_per_step: float


class StepCurve:
    """The seconds of a target's step as a function of the draft tokens that each request verifies."""

    def __init__(
        self,
        rows: float,
        table: StepTimeState,
        costs: StepCosts = UNKNOWN_COSTS,
        context_tokens: float = 0.0,
    ) -> None:
        """Read the times from `table`, or from `costs` if the worker reports no sound table."""
        if _is_sound(table):
            columns = zip(*table.seconds, strict=True)
            self._drafted: Sequence[float] = table.drafted
            self._seconds = [_interpolate(table.sequences, column, rows) for column in columns]
        else:
            self._drafted = (0, 1)
            self._seconds = [costs.decode_s(count * rows, context_tokens) for count in (1, 2)]

    def seconds(self, drafted: float) -> float:
        return max(_interpolate(self._drafted, self._seconds, drafted), 1e-9)


def plain_rate(rows: float, curve: StepCurve) -> Rate:
    return Rate(rows / curve.seconds(0), 1.0)


def local_rate(
    rows: float, curve: StepCurve, state: MethodState, chances: Sequence[float], drafted: int, levels: int
) -> Rate:
    """Predict the rate with drafts of `drafted` tokens, made on the decode worker in `levels` sequential
    passes. Only the share `state.found` of the requests gets a draft.
    """
    tokens = 1 + state.found * sum(chances)
    drafting_s = state.start_s + state.level_s * levels + state.token_s * rows * drafted
    return Rate(rows * tokens / (curve.seconds(state.found * drafted) + drafting_s), tokens)


def remote_rate(rows: float, curve: StepCurve, chances: Sequence[float], drafter: SharedDrafter) -> Rate:
    """Predict the rate with drafts of `len(chances)` tokens that a draft worker makes for the whole batch."""
    drafted, step_s = len(chances), curve.seconds(0)
    share = 1 / (1 + _steps_without(chances, step_s, drafter, rows))
    tokens = 1 + share * sum(chances)
    return Rate(rows * tokens / curve.seconds(share * drafted), tokens)


def _steps_without(chances: Sequence[float], step_s: float, drafter: SharedDrafter, rows: float) -> float:
    """Return the number of steps without a draft for each step with one.

    If the target accepts a whole draft, and its next token is the one that the draft worker drafted next,
    then the draft worker is already ahead, and the next draft arrives as soon as it is made. Otherwise the
    draft worker is notified and starts again; the tokens that the target adds until the new draft arrives
    must then agree with that draft, too.
    """
    drafted = len(chances)
    draft_step_s = _draft_step_seconds(drafter, rows)
    token_s = draft_step_s / max(drafter.costs.tokens_per_row, 1.0)
    agrees = chances[-1] ** (1 / drafted)
    goes_on = chances[-1] * agrees
    lag_steps = max((drafted + 1) * token_s / step_s - 1, 0.0)
    notice_s = max(drafter.answer_s - step_s, draft_step_s)
    restart_steps = max((notice_s + (drafted - 1) * token_s) / step_s, 1.0)
    return goes_on * lag_steps + (1 - goes_on) * restart_steps / max(agrees**restart_steps, 1e-9)


def _draft_step_seconds(drafter: SharedDrafter, rows: float) -> float:
    """Return the seconds of a draft worker's step for `rows` rows and the rows of its other targets."""
    drafting = drafter.others + rows
    return drafter.costs.decode_s(drafting, drafting * drafter.context_tokens)


def reading_seconds(drafter: SharedDrafter, num_tokens: int) -> float:
    """Return the time until a draft worker has read `num_tokens` of a text, after its waiting tokens."""
    costs = drafter.costs
    return costs.chunks_s(drafter.waiting_tokens + num_tokens, 0, costs.chunk_tokens)


def _is_sound(table: StepTimeState) -> bool:
    """Return whether both axes of the table ascend, with a positive time for each pair of their values."""
    axes = table.sequences, table.drafted
    return (
        all(axis and all(a < b for a, b in pairwise(axis)) for axis in axes)
        and [len(row) for row in table.seconds] == [len(table.drafted)] * len(table.sequences)
        and all(isfinite(value) and value > 0 for row in table.seconds for value in row)
    )


def _interpolate(xs: Sequence[float], ys: Sequence[float], x: float) -> float:
    """Interpolate linearly; extrapolate linearly beyond both ends."""
    if len(xs) < 2:
        return ys[0]
    above = min(max(bisect_right(xs, x), 1), len(xs) - 1)
    slope = (ys[above] - ys[above - 1]) / (xs[above] - xs[above - 1])
    return ys[above] + (x - xs[above]) * slope


FIRST_RATE = 0.75
"""[share] Acceptance at each position before any draft. It is optimistic, because a method that is never
tried is never measured.
"""
FIRST_WEIGHT = 20.0
"""[drafts] The weight of `FIRST_RATE`: a method that fails is given up after about as many drafts."""
METHOD_MEMORY = 500.0
"""[drafts] A method's rates average over as many of its latest drafts: those of a few dozen requests."""
OWN_WEIGHT = 1.0
"""[rejections] The weight of the method's rates against a request's own rejections. It is low, so that a few
failures in a row stop drafting for a request of a good method.
"""
TEXT_MEMORY = 16.0
"""[tokens] A request's counts average over as many of its latest tokens: about a hard passage of code."""


class MethodAcceptance:
    """A method's acceptance rates by position, over all of its requests, learned from verified drafts.

    Token i of a draft can only be accepted after token i - 1, so the rates are conditional. Old drafts fade.
    `found`: the share of granted tokens that were drafted.
    """

    def __init__(self, num_positions: int, rates: list[float] | None = None) -> None:
        """Start from `rates`, with the same uncertainty as before any draft."""
        self._tried = [FIRST_WEIGHT] * num_positions
        self._accepted = [FIRST_WEIGHT * rate for rate in rates or [FIRST_RATE] * num_positions]
        self.found = 1.0
        self._num_drafts = 0

    def rates(self) -> list[float]:
        """Return the rates. May be called from any thread."""
        pairs = zip(self._accepted, self._tried, strict=True)
        return [min(accepted / tried, 1.0) for accepted, tried in pairs]

    def observe(self, depth: int, num_accepted: int) -> None:
        """Record that the first `num_accepted` tokens of a draft of `depth` tokens were accepted."""
        kept = 1 - 1 / METHOD_MEMORY
        for position in range(min(num_accepted + 1, depth, len(self._tried))):
            self._tried[position] = kept * self._tried[position] + 1
            self._accepted[position] = kept * self._accepted[position] + (position < num_accepted)

    def observe_found(self, num_granted: int, num_drafted: int) -> None:
        """Record that a request drafted `num_drafted` of the `num_granted` tokens that it was allowed."""
        self._num_drafts += 1
        pace = max(1 / METHOD_MEMORY, 1 / (FIRST_WEIGHT + self._num_drafts))
        self.found += pace * (num_drafted / num_granted - self.found)


class RequestAcceptance:
    """One request's acceptance: its method's rates, and the hardness of its text. That is its rejections
    divided by those that the rates predict, both fading as the text grows.

    Its drafts also count for its method, and for its class with that method.
    """

    def __init__(self, method: MethodAcceptance, of_class: MethodAcceptance | None = None) -> None:
        self.method = method
        self._of_class = of_class
        self._rejected = 0.0
        self._expected = 0.0
        self._place = 0

    def survival(self) -> list[float]:
        """Return for each position the probability that a draft is accepted up to and including it."""
        hardness = (self._rejected + OWN_WEIGHT) / (self._expected + OWN_WEIGHT)
        survival, chance = [], 1.0
        for rate in self.method.rates():
            chance *= max(1 - hardness * (1 - rate), 0.0)
            survival.append(chance)
        return survival

    def age(self, place: int) -> None:
        """Fade the counts of earlier drafts, now that the request is `place` tokens long."""
        kept = (1 - 1 / TEXT_MEMORY) ** max(place - self._place, 0)
        self._rejected *= kept
        self._expected *= kept
        self._place = place

    def observe(self, depth: int, num_accepted: int, place: int) -> None:
        """Learn from a draft of `depth` tokens, of which the first `num_accepted` were accepted."""
        self.age(place)
        self._rejected += num_accepted < depth
        self._expected += sum([1 - rate for rate in self.method.rates()[: min(num_accepted + 1, depth)]])
        for shared in (self.method, self._of_class):
            if shared is not None:
                shared.observe(depth, num_accepted)
