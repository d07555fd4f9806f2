"""Measures a few steps at the start, on made-up sequences, so that a worker's costs are never unknown."""

from __future__ import annotations

import time

from costs.steps import StepWork, work_of
from engine.sampler import Sampler
from engine.step.profiling import ProfilingRun

_SHORT, _LONG = 64, 1024
"""Tokens before those that are computed; where there is no room for as many, half, and so on."""
_ROWS = 8
_CHUNKS = (16, 128)
_RUNS, _LEAST_RUNS = 5, 2
"""How often each step runs. The fastest counts: disturbances only add time, and the first run is cold."""
_MOST_S = 0.5
"""Seconds after which no more than the least runs are made."""


def measure_steps(
    profiling: ProfilingRun, sampler: Sampler, max_sequences: int, max_chunk: int
) -> list[tuple[StepWork, float]]:
    """Steps that decode few or many sequences, and chunks of prompts, with little or much before them."""
    many = min(_ROWS, max_sequences)
    wanted = [(1, _SHORT, 1), (many, _SHORT, 1), (many, _LONG, 1)]
    wanted += [(1, 0, _CHUNKS[0]), (1, 0, _CHUNKS[1]), (1, _LONG, _CHUNKS[1])]
    fastest: dict[StepWork, float] = {}
    until = time.perf_counter() + _MOST_S
    for run in range(_RUNS):
        if run >= _LEAST_RUNS and time.perf_counter() > until:
            break
        for rows, before, count in wanted:  # in turns: a disturbance is not all of one step's runs
            measured = _measure(profiling, sampler, rows, before, min(count, max_chunk))
            if measured is not None:
                work, seconds = measured
                fastest[work] = min(seconds, fastest.get(work, seconds))
    return list(fastest.items())


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
    started = time.perf_counter()
    logits = profiling.forward(sequences, wants_hidden=False).logits
    sampler.sample(logits, [sequence.sampling_row() for sequence in sequences])
    for sequence in sequences:
        sampler.forget(sequence.request_id)
    return work_of(sequences, [count] * rows), time.perf_counter() - started
