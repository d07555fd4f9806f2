"""What is known of the machine, the methods and the requests, learned from windows of steps."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from protocol.speculation import MethodState, RequestClass, Source, StepTimeState
from speculation.control.acceptance import MethodAcceptance, RequestAcceptance
from speculation.control.planner import DraftCost, Shape, SpeculatingRequest, StepCost
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
class Window:
    """Steps of one plan with one batch."""

    started: float
    num_sequences: int
    num_steps: int = 1
    drafted: int = 0
    accepted: int = 0
    draft_seconds: float = 0.0
    is_clean: bool = True
    """Whether its steps did nothing but decode."""
    latest: float = field(init=False)
    """When its latest step began."""
    longest: float = 0.0
    """[s] Of its steps before the latest."""

    def __post_init__(self) -> None:
        self.latest = self.started

    def next_step(self, now: float) -> None:
        self.longest = max(self.longest, now - self.latest)
        self.latest = now
        self.num_steps += 1

    def seconds(self, end: float) -> float:
        """As if the longest step took as long as the others: it may hold a pause of the process."""
        spent = end - self.started
        if self.num_steps == 1:
            return spent
        longest = max(self.longest, end - self.latest)
        return (spent - longest) * self.num_steps / (self.num_steps - 1)


class Estimator:
    def __init__(self, max_sequences: int, max_tokens: int, settings: Settings) -> None:
        self._settings = settings
        self._max_sequences, self._max_tokens = max_sequences, max_tokens
        self.max_rows = min(max_sequences * (1 + max_tokens), settings.most_rows)
        self.target = TargetTime(UNMEASURED, self.max_rows, settings)
        self.methods: dict[Source, MethodEstimate] = {}
        self.window: Window | None = None
        self.mean_prompt, self.mean_output = settings.first_prompt, settings.first_output

    def set_target_times(self, curve: MeasuredCurve) -> None:
        self.target = TargetTime(curve, self.max_rows, self._settings)

    def add_method(
        self, method: Source, shape: Shape, max_depth: int, *, reads_text: bool, reads_prompts: bool
    ) -> None:
        time_ = DraftTime(self._settings, self._settings.draft_level * self.target.seconds(1, 1))
        acceptance = MethodAcceptance(max_depth, self._settings)
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
        self.window = Window(time.perf_counter(), num_sequences)

    def disturb(self) -> None:
        """The latest step did something else beside decoding: nothing is learned from its window's time."""
        if self.window is not None:
            self.window.is_clean = False

    def end_window(self) -> tuple[float, float] | None:
        """The tokens and seconds of the window, from which times are learned; None without one, or where its
        steps did something else too.
        """
        window, self.window = self.window, None
        if window is None or not window.is_clean:
            return None
        seconds, steps, batch = window.seconds(time.perf_counter()), window.num_steps, window.num_sequences
        weight = min(steps / self._settings.draft_stands, 1.0)
        rows = batch + window.drafted / steps
        self.target.observe(batch, rows, (seconds - window.draft_seconds) / steps, weight)
        return float(batch * steps + window.accepted), seconds

    def drafted(
        self, method: Source, requests: Sequence[SpeculatingRequest], counts: Sequence[int], seconds: float
    ) -> None:
        """Drafts of up to `counts[i]` tokens were made for these requests."""
        if self.window is not None:
            self.window.draft_seconds += seconds
        known = self.methods[method]
        levels, tokens = 1 if known.shape.whole else max(counts), sum(counts)
        unread = sum([request.unread for request in requests])
        if unread >= self._settings.least_read:
            cost = self.draft_cost(method, len(requests))
            drafting = cost.start + cost.per_level * levels + cost.per_token * tokens
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
            self.window.accepted += num_accepted
        request.acceptance.observe_found(num_granted, num_drafted)
        if depth:
            request.acceptance.observe(depth, num_accepted, place, is_blind=is_blind)

    def ended(self, num_prompt: int, num_output: int) -> None:
        """A request ended with so many tokens of output, and of a prompt that was computed here."""
        pace = self._settings.length_pace
        self.mean_prompt += pace * (num_prompt - self.mean_prompt)
        self.mean_output += pace * (num_output - self.mean_output)

    # --- what is known ------------------------------------------------------------------------------

    def step_cost(self, num_sequences: int, most_drafted: int) -> StepCost:
        """Of a step without drafts."""
        return StepCost(self.target.with_drafts(num_sequences, most_drafted), float(num_sequences))

    def draft_cost(self, method: Source, num_requests: int) -> DraftCost:
        settings, known = self._settings, self.methods[method].time
        level = known.unit(num_requests)
        return DraftCost(
            start=settings.draft_start * level,
            per_level=level,
            per_token=settings.draft_token * level,
            reading=self.read_seconds(method, 1) / self.mean_output,
        )

    def read_seconds(self, method: Source, num_tokens: int) -> float:
        """To read so many tokens for drafting."""
        per_read = self.methods[method].time.per_read
        if per_read is None:
            per_read = self._settings.read_share * self.target.per_prompt_token
        return per_read * num_tokens

    def report(self) -> tuple[list[MethodState], StepTimeState]:
        """May be called from any thread."""
        sequences = _powers_of_two(self._max_sequences)
        drafted = [0, *_powers_of_two(self._max_tokens)]
        seconds = self.target.table(sequences, drafted)
        states = []
        for method, known in self.methods.copy().items():
            cost = self.draft_cost(method, max(known.num_requests, 1))
            state = MethodState(
                method=method,
                num_requests=known.num_requests,
                num_tokens=known.num_tokens,
                acceptance=known.acceptance.rates(),
                by_class={name: rates.rates() for name, rates in known.by_class.copy().items()},
                start_s=cost.start,
                level_s=cost.per_level,
                token_s=cost.per_token,
                read_s=self.read_seconds(method, 1) if known.reads_text else 0.0,
                found=min(max(known.acceptance.found, 0.0), 1.0),
            )
            states.append(state)
        return states, StepTimeState(sequences=sequences, drafted=drafted, seconds=seconds)


def _powers_of_two(most: int) -> list[int]:
    return [1 << power for power in range(most.bit_length())]
