"""What is known of the machine, the methods and the requests, learned from windows of steps."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import fmean

from protocol.speculation import MethodState, RequestClass, Source, SpeculationState, StepTimeState
from speculation.control.acceptance import MethodAcceptance, RequestAcceptance
from speculation.control.request import Shape, SpeculatingRequest
from speculation.control.settings import Settings
from speculation.control.step_time import UNMEASURED, DraftTime, MeasuredCurve, TargetTime


@dataclass(slots=True, eq=False)
class MethodEstimate:
    """`reads_text`: a request's text must be read before it drafts; `reads_prompts`: and that of its prompt
    while it is prefilled or never. The latest plan grants `num_tokens` to `num_requests`. The classes that
    have drafted have rates of their own, for the router.
    """

    shape: Shape
    acceptance: MethodAcceptance
    time: DraftTime
    reads_text: bool = False
    reads_prompts: bool = False
    num_requests: int = 0
    num_tokens: int = 0
    by_class: dict[RequestClass, MethodAcceptance] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class PlanWindow:
    """Steps of one plan with one batch: when each began, and the seconds of its drafting."""

    num_sequences: int
    begun: list[float] = field(default_factory=list)
    drafting: list[float] = field(default_factory=list)
    drafted: int = 0
    is_clean: bool = True
    """Whether its steps did nothing but decode."""

    def begin_step(self) -> None:
        self.begun.append(time.perf_counter())
        self.drafting.append(0.0)

    def step_seconds(self, end: float) -> tuple[float, float]:
        """The mean step, and the mean beside drafting. The longest step is left out with its drafting: it may
        hold a pause of the process, or a draft that first had to read a text.
        """
        whole = [after - before for before, after in pairwise([*self.begun, end])]
        steps = sorted(zip(whole, self.drafting, strict=True))
        kept = steps[:-1] or steps
        return fmean([step for step, _ in kept]), fmean([step - drafting for step, drafting in kept])


class Estimator:
    def __init__(self, max_sequences: int, max_tokens: int, settings: Settings) -> None:
        self._settings = settings
        self._max_sequences, self._max_tokens = max_sequences, max_tokens
        self.target = TargetTime(UNMEASURED, settings)
        self.methods: dict[Source, MethodEstimate] = {}
        self.window: PlanWindow | None = None
        self.mean_prompt, self.mean_output = settings.first_prompt, settings.first_output

    def set_target_times(self, curve: MeasuredCurve) -> None:
        self.target = TargetTime(curve, self._settings)

    def add_method(
        self, method: Source, shape: Shape, max_depth: int, *, reads_text: bool, reads_prompts: bool
    ) -> None:
        level = self._settings.draft_level * float(self.target.seconds(1, [0])[0])
        acceptance = MethodAcceptance(max_depth, self._settings)
        time_ = DraftTime(self._settings, level)
        self.methods[method] = MethodEstimate(shape, acceptance, time_, reads_text, reads_prompts)

    def new_request(
        self, method: Source | None, fixed_tokens: int | None, request_class: RequestClass | None = None
    ) -> SpeculatingRequest:
        if method is None:
            none = MethodAcceptance(0, self._settings)
            return SpeculatingRequest(None, fixed_tokens, RequestAcceptance(none, self._settings))
        known, of_class = self.methods[method], None
        if request_class is not None:
            of_class = known.by_class.get(request_class)
            if of_class is None:
                of_class = known.by_class[request_class] = known.acceptance.part()
        acceptance = RequestAcceptance(known.acceptance, self._settings, of_class)
        return SpeculatingRequest(method, fixed_tokens, acceptance)

    # --- learning -----------------------------------------------------------------------------------

    def begin_window(self, num_sequences: int) -> None:
        self.window = PlanWindow(num_sequences)
        self.window.begin_step()

    def disturb(self) -> None:
        """The latest step did something else beside decoding: nothing is learned from its window's time."""
        if self.window is not None:
            self.window.is_clean = False

    def end_window(self) -> float:
        """The window's seconds, from which times are learned; 0 without one, or where its steps did
        something else too.
        """
        window, self.window = self.window, None
        if window is None or not window.is_clean:
            return 0.0
        steps = len(window.begun)
        seconds, beside = window.step_seconds(time.perf_counter())
        weight = min(steps / self._settings.draft_stands, 1.0)
        self.target.observe(window.num_sequences, window.drafted / steps, beside, weight)
        return seconds * steps

    def drafted(
        self, method: Source, requests: Sequence[SpeculatingRequest], counts: Sequence[int], seconds: float
    ) -> None:
        """Drafts of up to `counts[i]` tokens were made for these requests."""
        if self.window is not None:
            self.window.drafting[-1] += seconds
        known = self.methods[method]
        levels, tokens = 1 if known.shape.whole else max(counts), sum(counts)
        unread = sum([request.unread for request in requests])
        if unread >= self._settings.least_read:
            drafting = known.time.unit(len(requests)) * known.time.units(levels, tokens)
            known.time.observe_reading(unread, seconds - drafting)
        else:
            known.time.observe(len(requests), levels, tokens, seconds)
        for request in requests:
            request.unread = 0

    def verified(
        self,
        request: SpeculatingRequest,
        num_granted: int,
        num_drafted: int,
        depth: int = 0,
        num_accepted: int = 0,
        place: int = 0,
        is_blind: bool = False,
    ) -> None:
        """The request, now `place` tokens long, had room for so many tokens in a step. Its draft was `depth`
        deep, if it had one.
        """
        if self.window is not None:
            self.window.drafted += num_drafted
        request.acceptance.observe_found(num_granted, num_drafted)
        if depth:
            request.acceptance.observe(depth, num_accepted, place, is_blind=is_blind)

    def ended(self, num_prompt: int, num_output: int) -> None:
        """A request ended with so many tokens of output, and of a prompt that was computed here."""
        pace = self._settings.length_pace
        self.mean_prompt += pace * (num_prompt - self.mean_prompt)
        self.mean_output += pace * (num_output - self.mean_output)

    # --- what is known ------------------------------------------------------------------------------

    def read_seconds(self, method: Source, num_tokens: int) -> float:
        """To read so many tokens for drafting."""
        per_read = self.methods[method].time.per_read
        if per_read is None:
            per_read = self._settings.read_share * self.target.per_prompt_token
        return per_read * num_tokens

    def report(self, max_tokens: int) -> SpeculationState:
        """`max_tokens`: the most that a request drafts by the deployment's configuration. For any thread."""
        sequences = _powers_of_two(self._max_sequences)
        drafted = [0, *_powers_of_two(self._max_tokens)]
        seconds = [
            self.target.seconds(count, [count * each for each in drafted]).tolist() for count in sequences
        ]
        return SpeculationState(
            max_tokens=max_tokens,
            methods=[self._state(method, known) for method, known in self.methods.copy().items()],
            step_time=StepTimeState(sequences=sequences, drafted=drafted, seconds=seconds),
        )

    def _state(self, method: Source, known: MethodEstimate) -> MethodState:
        unit = known.time.unit(max(known.num_requests, 1))
        return MethodState(
            method=method,
            num_requests=known.num_requests,
            num_tokens=known.num_tokens,
            acceptance=known.acceptance.rates(),
            by_class={name: rates.rates() for name, rates in known.by_class.copy().items()},
            start_s=self._settings.draft_start * unit,
            level_s=unit,
            token_s=self._settings.draft_token * unit,
            read_s=self.read_seconds(method, 1) if known.reads_text else 0.0,
            found=min(max(known.acceptance.found, 0.0), 1.0),
        )


def _powers_of_two(most: int) -> list[int]:
    return [1 << power for power in range(most.bit_length())]
