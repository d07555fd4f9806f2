"""Decides for each step how many tokens its requests draft, so that it commits the most tokens in a second.

A plan stands for some steps, whose time is measured as a whole: a step in which nobody drafts costs little
more than a comparison. A plan depends on earlier steps alone. Where no token of the output can depend on what
is drafted (coupled verification), the drafter's confidence in each token counts, too: a chain ends with a
token that is too unsure, and of all requests' tokens those are verified that are worth their time.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from costs.drafting import MIN_GAIN
from costs.explorer import TRIAL_SHARE, Explorer
from engine.step.draft import Draft
from protocol.speculation import Source
from speculation.control.estimator import Estimator
from speculation.control.plans import Load, Plan, plain_and_best, worth_verifying
from speculation.control.request import SpeculatingRequest

DRAFT_STANDS = 16
"""[steps] The duration of a plan that drafts: planning takes 3 % of a 0.4 ms step."""
IDLE_STANDS = 64
"""[steps] The duration where nothing is drafted, or all numbers are fixed."""
READ_MARGIN = 2.0
"""Prompts are read where drafts save so many times the time of it: savings are a difference of estimates."""
TRIAL_STEPS = 6
"""[steps] The duration of a trial: enough to outweigh its first step, which runs with cold caches."""


class DraftController:
    """Belongs to the engine's thread. Deterministic, given the clock."""

    def __init__(self, max_sequences: int, max_tokens: int, trial_share: float = TRIAL_SHARE) -> None:
        """`max_tokens`: the most that one draft has."""
        self.estimator = Estimator(max_sequences, max_tokens)
        self._explorer = Explorer(trial_share)
        self._load = 0, 0
        """Requests that decode, and that will soon."""
        self._steps_left = 0
        """The steps for which the present plan still stands."""
        self._fixed_to_come = False
        """Whether a request with a number of its own may be among those that will decode soon."""
        self._pays: dict[int, bool] = {}
        """Whether typical requests would draft, by the number of bits of how many there are."""
        self.drafts = False
        """Whether anybody drafts by the present plan."""
        self._prices = np.zeros(1)
        """The tokens that so many drafted rows of a step must bring."""
        self._tries = False
        """Whether the present plan is a trial of drafting."""
        self._sees = False
        """Whether anybody's prompt was read, by a method that must not miss a step after that."""

    def begin_step(self, num_decoding: int, num_to_come: int = 0) -> bool:
        """Return whether to `plan` the coming step; otherwise the present plan stands. Plans are made as if
        the requests to come did decode: what was read of their prompts is lost where drafting then doesn't
        pay.
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
        """Return whether a step of this load needs a plan of its own."""
        has_come = load[0] > self._load[0] or load[1] != self._load[1]
        return self._steps_left <= 0 or (has_come and (self._fixed_to_come or self._may_pay(load)))

    def may_go_ahead(self, num_decoding: int, num_to_come: int, reads_hidden: bool) -> bool:
        """Return whether nobody drafts in the coming step, and the present plan stands for it. Drafters that
        read hidden states miss none that it would capture: see `reads_steps`.
        """
        if self.drafts or self._is_due((num_decoding, num_to_come)):
            return False
        return not (reads_hidden and (self._sees or self._steps_left == 1))

    def went_ahead(self, num_decoding: int, num_to_come: int) -> None:
        """Note that the coming step was launched by the present plan. A plan that has become due since waits
        for the step after it.
        """
        if self.begin_step(num_decoding, num_to_come):
            self.end_window()
            self._steps_left = 0

    def join(self, request: SpeculatingRequest, *, is_read: bool) -> None:
        """Add a request, to which the present plan grants nothing. `is_read`: its prompt was, elsewhere.

        Where drafting doesn't pay at this load the plan stands: a new request is as likely to draft well as
        any other.
        """
        self._fixed_to_come |= bool(request.fixed_tokens)
        if request.fixed_tokens is not None or is_read or self._may_pay():
            self._steps_left = 0

    def _may_pay(self, load: tuple[int, int] | None = None) -> bool:
        return self._pays.get(sum(load or self._load).bit_length(), True)

    def end_window(self) -> None:
        """Learn from the steps since the latest plan. To be called when the engine has no more to do."""
        self._explorer.passed(self.estimator.end_window())

    @property
    def reads_steps(self) -> bool:
        """Whether a later draft may read what a step without drafts computes."""
        return self.drafts or self._sees or self._steps_left <= 0

    def reads_prompts(self, method: Source, num_tokens: int) -> bool:
        """Return whether so many tokens of prompts, prefilled in this step, are to be read for drafting."""
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
        size, gain = sum(self._load), 0.0
        for request in requests:
            request.granted = request.fixed_tokens or 0
            if request.granted and request.method is not None:
                rates = self.estimator.methods[request.method].acceptance.rates()
                gain += float(np.cumprod(rates)[: request.granted].sum())
        load = Load(size, size + gain, sum([request.granted for request in requests]))
        self._steps_left = IDLE_STANDS
        self._sees = self._tries = False
        for method, known in self.estimator.methods.items():
            group = [request for request in requests if request.method == method]
            if free := [request for request in group if request.fixed_tokens is None]:
                load = self._choose(method, free, load)
            if len(free) < len(group):
                known.calibration.floor = 0.0  # fixed numbers are drafted in full
            known.num_requests, known.num_tokens = len(group), sum([request.granted for request in group])
            self._sees |= known.reads_prompts and not all(request.is_blind for request in group)
        self.drafts = any(request.granted for request in requests)
        self._steps_left -= 1
        self.estimator.begin_window(len(requests))

    def _choose(self, method: Source, requests: list[SpeculatingRequest], load: Load) -> Load:
        """Grant tokens to the requests if that pays, or for a trial. Return the step with their drafts."""
        known, estimator = self.estimator.methods[method], self.estimator
        size, most = load.num_sequences, known.shape.max_tokens
        able = [each for each in requests if not (known.shape.whole and (each.most or most) < most)]
        plain, best = plain_and_best(estimator.target, known, len(able), load)
        worth = self._worth(plain, best)
        self._pays[size.bit_length()] = worth > self._typical_reading(method)
        drafting = [each for each in able if estimator.read_seconds(method, each.unread) < worth]
        stands = DRAFT_STANDS if drafting else IDLE_STANDS
        is_shown = not (known.reads_prompts and all(request.is_blind for request in able))
        other = [] if drafting else able
        if is_shown and self._explorer.tries(self._price(method, other, plain, best)):
            drafting, stands, self._tries = other, TRIAL_STEPS, True
        self._steps_left = min(self._steps_left, stands)
        if not drafting:
            return load
        for request in drafting:
            request.granted = min(best.depth, request.most or best.depth)
        known.calibration.floor = best.floor
        self._prices = best.rate * estimator.target.seconds(size, load.rows + np.arange(1 + most * size))
        return best.load

    def _worth(self, plain: Plan, best: Plan) -> float:
        """Return the seconds that drafts save each request at least; not above 0 if they do not pay."""
        return self.estimator.mean_output * (1 / (plain.rate * (1 + MIN_GAIN)) - 1 / best.rate)

    def _typical_reading(self, method: Source) -> float:
        """Return the seconds to read a prompt for drafting."""
        reads = self.estimator.methods[method].reads_text
        return (
            READ_MARGIN * self.estimator.read_seconds(method, int(self.estimator.mean_prompt))
            if reads
            else 0.0
        )

    def _typical_pays(self, method: Source, num_requests: int) -> bool:
        """Return whether so many requests would draft, the prompts of which are to be read first."""
        known, load = self.estimator.methods[method], Load(num_requests, num_requests)
        plain, best = plain_and_best(self.estimator.target, known, num_requests, load)
        return self._worth(plain, best) > self._typical_reading(method)

    def _price(self, method: Source, requests: list[SpeculatingRequest], plain: Plan, best: Plan) -> float:
        """Return the seconds that a trial loses in which these requests draft, none without the best plan. At
        least one token of each draft is verified.
        """
        trial, instead = (best, plain) if requests else (plain, best)
        load, rows = trial.load, max(trial.load.rows, len(requests))
        seconds = float(self.estimator.target.seconds(load.num_sequences, [rows])[0]) + load.drafting
        lost = max(1 - load.tokens / seconds / instead.rate, MIN_GAIN)
        unread = sum([request.unread for request in requests])
        return TRIAL_STEPS * seconds * lost + self.estimator.read_seconds(method, unread)

    # --- after drafting -----------------------------------------------------------------------------

    def admit(self, method: Source, drafted: Sequence[tuple[SpeculatingRequest, Draft]]) -> list[int]:
        """Return how many tokens of each draft, all of which have confidences, are verified."""
        known = self.estimator.methods[method]
        told = np.full((len(drafted), known.latest.num_positions), -np.inf)
        for line, (request, draft) in zip(told, drafted, strict=True):
            request.confidences = confidences = draft.confidences or ()
            line[: len(confidences)] = confidences[: len(line)]
        survival = known.calibration.survival(told)
        sees = [not draft.is_blind for _, draft in drafted]  # blind ones tell nothing of others
        known.latest.add(survival if all(sees) else survival[sees], known.calibration.floor)
        counts = worth_verifying(survival, self._prices)
        # What is never verified is never known.
        return [max(count, 1) for count in counts] if self._tries else counts
