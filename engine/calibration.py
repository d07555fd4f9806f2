"""Measures a few steps at the start, on made-up sequences, so that a worker's costs are never unknown."""

from __future__ import annotations

import time

from engine.profiling import ProfilingRun
from engine.sampler import Sampler
from engine.step_times import StepWork, work_of

_SHORT, _LONG = 64, 1024
"""Tokens before those that are computed; where there is no room for as many, half, and so on."""
_ROWS = 8
_CHUNKS = (16, 128)
_RUNS = 3
"""Of which the fastest counts: whatever disturbs only adds, and the first one finds cold memory."""
_QUICK_S = 0.03
"""A step that takes longer is run twice only."""


def measure_steps(
    profiling: ProfilingRun, sampler: Sampler, max_sequences: int, max_chunk: int
) -> list[tuple[StepWork, float]]:
    """Steps that decode few or many sequences, and chunks of prompts, with little or much before them."""
    many = min(_ROWS, max_sequences)
    wanted = [(1, _SHORT, 1), (many, _SHORT, 1), (many, _LONG, 1)]
    wanted += [(1, 0, _CHUNKS[0]), (1, 0, _CHUNKS[1]), (1, _LONG, _CHUNKS[1])]
    found = [
        _measure(profiling, sampler, rows, before, min(count, max_chunk)) for rows, before, count in wanted
    ]
    return [measured for measured in found if measured is not None]


def _measure(
    profiling: ProfilingRun, sampler: Sampler, rows: int, before: int, count: int
) -> tuple[StepWork, float] | None:
    sequences = profiling.sequences(rows, before + count, 1)
    while sequences is None and before + count > 2:
        before, count = before // 2, max(count // 2, 1)
        sequences = profiling.sequences(rows, before + count, 1)
    if sequences is None:
        return None
    for sequence in sequences:
        sequence.num_computed = before
    best = float("inf")
    for run in range(_RUNS):
        started = time.perf_counter()
        logits = profiling.forward(sequences, wants_hidden=False).logits
        sampler.sample(logits, [sequence.sampling_row() for sequence in sequences])
        for sequence in sequences:
            sampler.forget(sequence.request_id)
        seconds = time.perf_counter() - started
        best = min(best, seconds)
        if run and seconds > _QUICK_S:
            break
    return work_of(sequences, [count] * rows), best
