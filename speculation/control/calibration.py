"""Measures at start how long the target's forwards take, on made-up sequences. Takes about 0.2 seconds."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from torch import Tensor

from costs.widths import UNMEASURED, MeasuredCurve
from engine.step.draft import Draft, Verdict
from engine.step.profiling import ProfilingRun
from engine.step.sequence import SequenceState
from speculation.drafter import Computed, Drafter, HiddenRows

Verify = Callable[[Sequence[SequenceState], Tensor], list[Verdict]]

_RUNS = 3
"""Runs of each measurement. The fastest counts: disturbances only add."""
_LONGEST_S = 0.05
"""Forwards that take longer are not measured, so that workers start soon."""
_CONTEXT, _PROMPT = 64, 256
"""Tokens of a sequence that decodes, and of one that is prefilled."""
_ROWS = 32
"""The most rows of a sequence: drafts are hardly ever longer."""


def measure_target(profiling: ProfilingRun, verify: Verify, max_sequences: int) -> MeasuredCurve:
    """Measure powers of two of rows, of as few sequences as may have so many. Return `UNMEASURED` if two do
    not fit.
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
    prompt = min(_PROMPT, profiling.max_model_len - 1)
    sequences = profiling.sequences(1, prompt, 1)
    per_token = UNMEASURED.per_prompt_token
    if sequences is not None:
        per_token = _least_seconds(lambda: profiling.forward(sequences, wants_hidden=False)) / prompt
    return MeasuredCurve(rows, seconds, per_token)


def _verify_seconds(profiling: ProfilingRun, verify: Verify, num_sequences: int, rows: int) -> float | None:
    """Measure a decode step with so many rows of each sequence; None if there is no room for it."""
    sequences = profiling.sequences(num_sequences, _CONTEXT, rows)
    if sequences is None:
        return None
    for sequence in sequences:
        sequence.num_computed = _CONTEXT - 1
        sequence.draft = Draft([1] * (rows - 1)) if rows > 1 else None
    return _least_seconds(lambda: verify(sequences, profiling.forward(sequences).logits))


def measure_reading(profiling: ProfilingRun, drafter: Drafter) -> float | None:
    """Measure the seconds that a head adds to each token of a prompt; None if there is no room."""
    prompt = min(_PROMPT, profiling.max_model_len - 1)
    sequences = profiling.sequences(1, prompt, 1)
    if sequences is None:
        return None

    def read() -> None:
        drafter.begin(sequences[0], 0, None)
        hidden = profiling.forward(sequences).hidden
        assert hidden is not None
        drafter.observe([Computed(sequences[0], 0, prompt, HiddenRows(hidden, range(prompt)))])

    plain = _least_seconds(lambda: profiling.forward(sequences, wants_hidden=False))
    reading = _least_seconds(read)
    drafter.forget(sequences[0].request_id)
    return max(reading - plain, 0.0) / prompt


def _least_seconds(action: Callable[[], object]) -> float:
    seconds = []
    for _ in range(1 + _RUNS):  # the first one may compile
        started = time.perf_counter()
        action()
        seconds.append(time.perf_counter() - started)
    return min(seconds[1:])
