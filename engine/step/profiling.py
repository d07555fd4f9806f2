"""Profiling at start with made-up sequences: the cost of steps, and the GPU memory of the largest step.

So a worker knows its costs from the start. The memory is measured before the pool is made.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable

import torch
from torch import Tensor

from costs.steps import StepWork, work_of
from engine.batch.runner import ForwardOutput, Runner, Step
from engine.batch.step_inputs import SequenceRows
from engine.kv.block_manager import BlockManager
from engine.kv.layout import PoolLayout
from engine.kv.pool import KVPool
from engine.kv.sequence_blocks import SequenceBlocks
from engine.sampler import Sampler
from engine.step.packing import pack
from engine.step.scheduler import ScheduledStep
from engine.step.sequence import SequenceStage, SequenceState
from protocol.requests import EngineRequest
from protocol.sampling import SamplingParams

_PHRASE = 7
"""Period of the made-up text, in tokens. It repeats so that every drafting method proposes something."""
_TENANT = "\0profiling"
"""Cache salt of the made-up text, so that drafters never use it for requests."""


class ProfilingRun:
    """Made-up sequences to run. `close` frees their blocks; nothing is published to the prefix cache."""

    def __init__(self, blocks: BlockManager, runner: Runner, max_model_len: int) -> None:
        self._blocks = blocks
        self._runner = runner
        self.max_model_len = max_model_len
        self._sequences: list[SequenceState] = []

    def sequences(self, count: int, num_tokens: int, room: int) -> list[SequenceState] | None:
        """Return `count` sequences of `num_tokens` uncomputed tokens, with blocks for `room` more; None if
        they do not fit. Free the sequences of the previous call.
        """
        self.close()
        if num_tokens + room > self.max_model_len:
            return None
        for index in range(count):
            sequence = _made_up(index, num_tokens)
            sequence.sequence_blocks = SequenceBlocks(self._blocks, root=b"")
            self._sequences.append(sequence)
            if not sequence.held.grow(0, num_tokens + room):
                self.close()
                return None
        return list(self._sequences)

    def forward(self, sequences: list[SequenceState], *, wants_hidden: bool = True) -> ForwardOutput:
        """Run all uncomputed tokens and drafts, with logits for the last token and each draft token."""
        packed = pack(ScheduledStep(sequences, [sequence.num_uncomputed for sequence in sequences]))
        return self._runner.run(packed.step(wants_hidden=wants_hidden))

    def close(self) -> None:
        for sequence in reversed(self._sequences):
            sequence.held.free()
        self._sequences = []


def _made_up(index: int, num_tokens: int) -> SequenceState:
    request = EngineRequest(
        request_id=f"profiling-{index}",
        prompt_token_ids=[1 + place % _PHRASE for place in range(num_tokens - 1)],
        output_token_ids=[1 + (num_tokens - 1) % _PHRASE],
        cache_salt=_TENANT,
        sampling=SamplingParams(max_tokens=1 << 20, temperature=0.0, ignore_eos=True),
    )
    return SequenceState(request, order=index, stage=SequenceStage.RUNNING, state_slot=index)


_SHORT, _LONG = 64, 1024
"""Lengths of the context before the computed tokens; halved as long as the pool has no room for them."""
_ROWS = 8
_CHUNKS = (16, 64)
_RUNS = 5
"""Most runs of each step. The fastest counts: disturbances only add time."""
_MOST_S = 0.5
"""Seconds after which no step is repeated."""


def measure_steps(
    profiling: ProfilingRun, sampler: Sampler, max_sequences: int, max_chunk: int
) -> list[tuple[StepWork, float]]:
    """Measure steps that decode few or many sequences, and prefill chunks, after short and long contexts.

    The first step also runs once before the measurement, to warm up.
    """
    many = min(_ROWS, max_sequences)
    wanted = [(1, _SHORT, 1), (many, _SHORT, 1), (many, _LONG, 1)]
    wanted += [(1, 0, _CHUNKS[0]), (1, 0, _CHUNKS[1]), (1, _LONG, _CHUNKS[1])]
    fastest: dict[StepWork, float] = {}
    until = time.perf_counter() + _MOST_S
    _measure(profiling, sampler, *wanted[0])
    for run in range(_RUNS):
        if run and time.perf_counter() > until:
            break
        for rows, before, count in wanted:  # in turns, so that no disturbance hits all runs of one step
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


_FIRST_TOKENS = 2
"""Number of tokens of a first forward, whose one-time allocations are left out of the measurement."""


def activation_bytes(
    make_runner: Callable[[KVPool], Runner],
    layout: PoolLayout,
    device: torch.device,
    num_tokens: int,
    rows: int,
    choose: Callable[[Tensor], object],
    adapter: int = 0,
) -> int:
    """Measure the peak bytes of a forward of `num_tokens` prompt tokens with the slot `adapter`, and of
    `choose` with the logits of `rows` of the tokens.
    """
    blocks = list(range(-(-num_tokens // layout.block_size)))
    tables = [blocks] * len(layout.windows)
    runner = make_runner(KVPool(layout, len(blocks), device, None))
    with torch.inference_mode():
        for count in (_FIRST_TOKENS, num_tokens):
            torch.cuda.reset_peak_memory_stats(device)
            before = torch.cuda.memory_allocated(device)
            batch = [SequenceRows([0] * count, 0, tables, adapter=adapter)]
            choose(runner.run(Step(batch, range(min(rows, count)))).logits)
        taken = torch.cuda.max_memory_allocated(device) - before
    del runner
    gc.collect()
    torch.cuda.empty_cache()
    return taken
