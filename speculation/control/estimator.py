"""Estimates of the machine, the methods and the requests: measured at start, then learned from steps."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

from costs.drafting import MethodAcceptance, RequestAcceptance
from costs.widths import UNMEASURED, DraftTime, MeasuredCurve, TargetTime
from engine.step.draft import Draft, Verdict
from engine.step.profiling import ProfilingRun
from engine.step.sequence import SequenceState
from protocol.speculation import (
    METHODS,
    MethodState,
    RequestClass,
    Source,
    SpeculationState,
    SpeculativeConfig,
    StepTimeState,
)
from speculation.drafter import ComputedRows, Drafter, HiddenRows

DRAFT_LEVEL = 0.003
"""[plain steps] The cost of a level of drafting until it is measured: optimistic, so that it is tried."""
READ_SHARE = 0.15
"""[share] The time to read a prompt token for drafting, as a share of its prefill, until it is measured: the
value of the bundled heads.
"""
FIRST_PROMPT, FIRST_OUTPUT = 256.0, 128.0
"""[tokens] The mean lengths of prompts and answers that are assumed until a request ends. The cost of reading
a prompt for drafting is spread over the answer.
"""
LENGTH_PACE = 0.05
"""[share] The weight of a request that ends in both means."""


Origin = Literal["computed", "prefix_hit", "handed_over"]
"""The source of a prompt's KV: all computed here, partly from the prefix cache, or from another worker."""


@dataclass(frozen=True, slots=True)
class Shape:
    """The shape of a method's drafts: chains of up to `max_tokens`; if `whole`, exactly as many or none."""

    max_tokens: int
    whole: bool = False

    @property
    def width(self) -> int:
        """The tokens of a slot, which are drafted together or not at all."""
        return self.max_tokens if self.whole else 1


@dataclass(slots=True, eq=False)
class SpeculatingRequest:
    """One request of the batch. Without a `method` it does not speculate; `fixed_tokens` None means "auto".
    `most`, if given, limits its draft tokens.

    `place` is its number of tokens; `unread` counts the tokens that the drafter must read before it drafts;
    `is_blind` says that its prompt was not read and cannot be any more. It drafts `granted` tokens in each
    step of the present plan.
    """

    method: Source | None
    fixed_tokens: int | None
    acceptance: RequestAcceptance
    origin: Origin = "computed"
    place: int = 0
    unread: int = 0
    is_blind: bool = False
    granted: int = 0
    most: int | None = None


def draft_shape(method: Source, options: SpeculativeConfig) -> Shape:
    """Return the numbers of tokens that the controller can choose from for a request of this method."""
    if method == "lookahead":
        return Shape(options.lookahead_rows, whole=True)
    if options.tree and method == options.method:
        return Shape(options.tree_nodes, whole=True)
    return Shape(options.max_speculative_tokens)


def default_drafted(options: SpeculativeConfig) -> int:
    """Return the most tokens that a request drafts if it asks for no number of its own."""
    fixed = options.fixed_tokens
    return draft_shape(options.method, options).max_tokens if fixed is None else fixed


def most_drafted(options: SpeculativeConfig) -> int:
    """Return the most tokens of a request's draft, by any method that it may ask for."""
    return max(draft_shape(method, options).max_tokens for method in METHODS)


@dataclass(slots=True, eq=False)
class MethodEstimate:
    """A method's estimates. `reads_text`: a request's text must be read before it drafts; `reads_prompts`:
    its prompt must be read during prefill, or never. The latest plan grants `num_tokens` to `num_requests`.
    Classes that have drafted have rates of their own, for the router.
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
    """Steps of one plan with one batch since `began`; seconds of drafting and draft tokens in them."""

    num_sequences: int
    began: float
    steps: int = 1
    drafting: float = 0.0
    drafted: int = 0
    is_clean: bool = True
    """Whether the window's steps did nothing but decode."""


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
        """Record that the latest step did more than decode: nothing is learned from its window's time."""
        if self.window is not None:
            self.window.is_clean = False

    def end_window(self) -> float:
        """Learn times from the window; return its seconds, or 0 without one or if it was disturbed."""
        window, self.window = self.window, None
        if window is None or not window.is_clean:
            return 0.0
        seconds, steps = time.perf_counter() - window.began, window.steps
        self.target.observe(window.num_sequences, window.drafted / steps, (seconds - window.drafting) / steps)
        return seconds

    def drafted(
        self, method: Source, requests: Sequence[SpeculatingRequest], counts: Sequence[int], seconds: float
    ) -> None:
        """Record that drafts of up to `counts[i]` tokens were made for these requests."""
        if self.window is not None:
            self.window.drafting += seconds
        known = self.methods[method]
        levels, tokens = 1 if known.shape.whole else max(counts), sum(counts)
        unread = sum([request.unread for request in requests])
        if unread:
            drafting = known.time.unit(len(requests)) * known.time.units(levels, tokens)
            known.time.observe_reading(unread, seconds - drafting)
        else:
            known.time.observe(len(requests), levels, tokens, seconds)
        for request in requests:
            request.unread = 0

    def verified(self, request: SpeculatingRequest, num_granted: int, num_drafted: int) -> None:
        """Record that a request with room for `num_granted` draft tokens had `num_drafted` in a step."""
        if self.window is not None:
            self.window.drafted += num_drafted
        request.acceptance.method.observe_found(num_granted, num_drafted)

    def ended(self, num_prompt: int, num_output: int) -> None:
        """Record that a request ended: its output tokens, and its prompt tokens that were computed here."""
        self.mean_prompt += LENGTH_PACE * (num_prompt - self.mean_prompt)
        self.mean_output += LENGTH_PACE * (num_output - self.mean_output)

    # --- what is known ------------------------------------------------------------------------------

    def read_seconds(self, method: Source, num_tokens: int) -> float:
        per_read = self.methods[method].time.per_read
        if per_read is None:
            per_read = READ_SHARE * self.target.per_prompt_token
        return per_read * num_tokens

    def report(self, max_tokens: int) -> SpeculationState:
        """Return the router's report. Requests draft at most `max_tokens`. Any thread may call this."""
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


Verify = Callable[[Sequence[SequenceState], Tensor], list[Verdict]]

_RUNS = 3
"""Runs of each measurement. The fastest counts, since disturbances only add time."""
_LONGEST_S = 0.05
"""[s] The longest forward that is measured, so that workers start soon."""
_CONTEXT, _PROMPT = 64, 256
"""Tokens of a decoding sequence, and of a prefilled one."""
_ROWS = 32
"""The most rows of a sequence: drafts are seldom longer."""


def measure_target(profiling: ProfilingRun, verify: Verify, max_sequences: int) -> MeasuredCurve:
    """Measure the target's forwards on made-up sequences, in about 0.2 seconds at start: for powers of two of
    rows, each with the fewest sequences that can have them. Return `UNMEASURED` if fewer than two fit.
    """
    rows: list[int] = []
    seconds: list[float] = []
    while not seconds or 2 * seconds[-1] < _LONGEST_S:
        count = 1 << len(rows)
        num_sequences = -(-count // _ROWS)
        found = None
        if num_sequences <= max_sequences:
            found = _verify_seconds(profiling, verify, num_sequences, count // num_sequences)
        if found is None:
            break
        rows.append(count)
        seconds.append(found)
    if len(rows) < 2:
        return UNMEASURED
    per_token = UNMEASURED.per_prompt_token
    prompt = _prompt(profiling)
    if prompt is not None:
        per_token = _least_seconds(lambda: profiling.forward([prompt], wants_hidden=False))
        per_token /= prompt.num_uncomputed
    return MeasuredCurve(rows, seconds, per_token)


def _prompt(profiling: ProfilingRun) -> SequenceState | None:
    """Return a prompt to prefill; None if there is no room."""
    found = profiling.sequences(1, min(_PROMPT, profiling.max_model_len - 1), 1)
    return found[0] if found is not None else None


def _verify_seconds(profiling: ProfilingRun, verify: Verify, num_sequences: int, rows: int) -> float | None:
    """Return the seconds of a decode step with `rows` rows per sequence; None if there is no room for it."""
    sequences = profiling.sequences(num_sequences, _CONTEXT, rows)
    if sequences is None:
        return None
    for sequence in sequences:
        sequence.num_computed = _CONTEXT - 1
        sequence.draft = Draft([1] * (rows - 1)) if rows > 1 else None
    return _least_seconds(lambda: verify(sequences, profiling.forward(sequences).logits))


def measure_reading(profiling: ProfilingRun, drafter: Drafter) -> float | None:
    """Return the seconds that a head adds to each token of a prompt; None if there is no room."""
    prompt = _prompt(profiling)
    if prompt is None:
        return None
    tokens = prompt.num_uncomputed

    def read() -> None:
        drafter.begin(prompt, 0, None)
        hidden = profiling.forward([prompt]).hidden
        assert hidden is not None
        drafter.observe([ComputedRows(prompt, 0, tokens, HiddenRows(hidden, range(tokens)))])

    plain = _least_seconds(lambda: profiling.forward([prompt], wants_hidden=False))
    reading = _least_seconds(read)
    drafter.forget(prompt.request_id)
    return max(reading - plain, 0.0) / tokens


def _least_seconds(action: Callable[[], object]) -> float:
    seconds = []
    for _ in range(1 + _RUNS):  # the first run may compile
        started = time.perf_counter()
        action()
        seconds.append(time.perf_counter() - started)
    return min(seconds[1:])
