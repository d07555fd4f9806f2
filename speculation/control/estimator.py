"""Estimates of the machine, the methods and the requests, learned from windows of steps."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from costs.acceptance import MethodAcceptance, RequestAcceptance
from costs.widths import UNMEASURED, DraftTime, TargetTime
from protocol.speculation import MethodState, RequestClass, Source, SpeculationState, StepTimeState
from speculation.control.request import Shape, SpeculatingRequest

DRAFT_LEVEL = 0.003
"""[plain steps] A level of drafting, until it is measured. Optimistic, so that it is tried and measured."""
READ_SHARE = 0.15
"""[share] Time to read a token of a prompt for drafting, as a share of its prefill, before it was measured:
that of the bundled heads.
"""
LEAST_READ = 32
"""[tokens] Fewer are read along with any draft and tell nothing of how long reading takes."""
FIRST_PROMPT, FIRST_OUTPUT = 256.0, 128.0
"""[tokens] The mean prompt and answer before any request ended. Reading a text must pay within the answer."""
LENGTH_PACE = 0.05
"""[share] The weight of a request that ends in both means."""


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
    """Steps of one plan with one batch, since `began`: seconds of their drafting, and tokens drafted."""

    num_sequences: int
    began: float
    steps: int = 1
    drafting: float = 0.0
    drafted: int = 0
    is_clean: bool = True
    """Whether its steps did nothing but decode."""


class Estimator:
    def __init__(self, max_sequences: int, max_tokens: int) -> None:
        self._max_sequences, self._max_tokens = max_sequences, max_tokens
        self.target = TargetTime(UNMEASURED)
        self.methods: dict[Source, MethodEstimate] = {}
        self.window: PlanWindow | None = None
        self.mean_prompt, self.mean_output = FIRST_PROMPT, FIRST_OUTPUT

    def add_method(
        self, method: Source, shape: Shape, max_depth: int, *, reads_text: bool, reads_prompts: bool
    ) -> None:
        time_ = DraftTime(DRAFT_LEVEL * float(self.target.seconds(1, [0])[0]))
        acceptance = MethodAcceptance(max_depth)
        self.methods[method] = MethodEstimate(shape, acceptance, time_, reads_text, reads_prompts)

    def new_request(
        self, method: Source | None, fixed_tokens: int | None, request_class: RequestClass | None = None
    ) -> SpeculatingRequest:
        if method is None:
            return SpeculatingRequest(None, fixed_tokens, RequestAcceptance(MethodAcceptance(0)))
        known, of_class = self.methods[method], None
        if request_class is not None:
            of_class = known.by_class.get(request_class)
            if of_class is None:
                rates = known.acceptance.rates()
                of_class = known.by_class[request_class] = MethodAcceptance(len(rates), rates)
        return SpeculatingRequest(method, fixed_tokens, RequestAcceptance(known.acceptance, of_class))

    # --- learning -----------------------------------------------------------------------------------

    def begin_window(self, num_sequences: int) -> None:
        self.window = PlanWindow(num_sequences, time.perf_counter())

    def disturb(self) -> None:
        """Note that the latest step did more than decode: nothing is learned from its window's time."""
        if self.window is not None:
            self.window.is_clean = False

    def end_window(self) -> float:
        """Learn times from the window, and return its seconds; 0 without one, or if it was disturbed."""
        window, self.window = self.window, None
        if window is None or not window.is_clean:
            return 0.0
        seconds, steps = time.perf_counter() - window.began, window.steps
        self.target.observe(window.num_sequences, window.drafted / steps, (seconds - window.drafting) / steps)
        return seconds

    def drafted(
        self, method: Source, requests: Sequence[SpeculatingRequest], counts: Sequence[int], seconds: float
    ) -> None:
        """Note that drafts of up to `counts[i]` tokens were made for these requests."""
        if self.window is not None:
            self.window.drafting += seconds
        known = self.methods[method]
        levels, tokens = 1 if known.shape.whole else max(counts), sum(counts)
        unread = sum([request.unread for request in requests])
        if unread >= LEAST_READ:
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
        """Note that the request, now `place` tokens long, had room for so many tokens in a step. Its draft
        was `depth` deep, if it had one.
        """
        if self.window is not None:
            self.window.drafted += num_drafted
        request.acceptance.method.observe_found(num_granted, num_drafted)
        if depth:
            request.acceptance.observe(depth, num_accepted, place, is_blind=is_blind)

    def ended(self, num_prompt: int, num_output: int) -> None:
        """Note that a request ended with so many tokens of output, and of a prompt that was computed here."""
        self.mean_prompt += LENGTH_PACE * (num_prompt - self.mean_prompt)
        self.mean_output += LENGTH_PACE * (num_output - self.mean_output)

    # --- what is known ------------------------------------------------------------------------------

    def read_seconds(self, method: Source, num_tokens: int) -> float:
        """Return the seconds to read so many tokens for drafting."""
        per_read = self.methods[method].time.per_read
        if per_read is None:
            per_read = READ_SHARE * self.target.per_prompt_token
        return per_read * num_tokens

    def report(self, max_tokens: int) -> SpeculationState:
        """Return the router's report. `max_tokens`: the most that a request drafts by the deployment's
        configuration. For any thread.
        """
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
            start_s=known.time.start * unit,
            level_s=unit,
            token_s=known.time.token * unit,
            read_s=self.read_seconds(method, 1) if known.reads_text else 0.0,
            found=min(max(known.acceptance.found, 0.0), 1.0),
        )


def _powers_of_two(most: int) -> list[int]:
    return [1 << power for power in range(most.bit_length())]
