"""Measures forwards and engine steps."""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from bench.gpu.clock import launches_of, time_of
from bench.gpu.model import BLOCK_SIZE, Forwards, MadeUpModel
from bench.gpu.roofline import StepCost, tokens_of
from engine.engine import Engine
from protocol.config import ServeConfig
from protocol.requests import EngineRequest
from protocol.sampling import SamplingParams
from protocol.speculation import MAX_DRAFT_TOKENS, SpeculativeConfig
from speculation.speculator import BatchSpeculator


@dataclass(frozen=True)
class GpuPlan:
    batches: Sequence[int]
    drafted: Sequence[int]
    chunks: Sequence[int]
    context: int
    acceptance: float

    @property
    def longest(self) -> int:
        """Return the length of the longest sequence."""
        return max(self.context, *self.chunks)

    @property
    def num_tokens(self) -> int:
        """Return the number of tokens that the pool must hold."""
        return max(max(self.batches) * (self.context + BLOCK_SIZE), self.longest)


@dataclass(frozen=True)
class Measured:
    """One forward of `sequences` with `rows_each` rows; `launches` is None on a CPU."""

    sequences: int
    rows_each: int
    context: int
    device_s: float
    host_s: float
    launches: int | None
    work: StepCost


def forward(model: MadeUpModel, forwards: Forwards, sequences: int, rows: int, context: int) -> Measured:
    """Measure a forward, with logits for all rows of a verified draft, or for the last row of a chunk."""
    is_chunk = rows == context
    logits = 1 if is_chunk else rows
    run = partial(forwards.run, forwards.batch(sequences, rows, context), logits)
    taken = time_of(run, model.device)
    return Measured(
        sequences,
        rows,
        context,
        *taken,
        launches_of(run, model.device),
        model.costs.step(sequences, rows, context, logits),
    )


@dataclass(frozen=True)
class Results:
    """`decode` and `prefill` are forwards; `steps` maps a number of sequences to the seconds of a whole
    engine step; `eager_s` are the seconds of the forwards of `decode` without CUDA graphs.
    """

    choice: str
    decode: list[Measured]
    prefill: list[Measured]
    steps: dict[int, float]
    eager_s: list[float]


def measure(model: MadeUpModel, plan: GpuPlan) -> Results:
    eager = [
        each.device_s for each in _decode(model, model.forwards(plan.num_tokens, _config(plan, True)), plan)
    ]
    forwards = model.forwards(plan.num_tokens, _config(plan, False))
    decode = _decode(model, forwards, plan)
    prefill = [forward(model, forwards, 1, chunk, chunk) for chunk in plan.chunks]
    choice = forwards.choice
    del forwards  # frees its pool for the engines
    steps = {batch: _step_s(model, plan, batch) for batch in plan.batches}
    return Results(choice, decode, prefill, steps, eager)


def _decode(model: MadeUpModel, forwards: Forwards, plan: GpuPlan) -> list[Measured]:
    rows = [1 + drafted for drafted in plan.drafted]
    return [forward(model, forwards, batch, each, plan.context) for batch in plan.batches for each in rows]


def _config(plan: GpuPlan, enforce_eager: bool) -> ServeConfig:
    drafted = min(max(plan.drafted), MAX_DRAFT_TOKENS)
    return ServeConfig(
        max_num_seqs=max(plan.batches),
        speculative_config=SpeculativeConfig(method="ngram", num_speculative_tokens=drafted),
        enforce_eager=enforce_eager,
    )


def _step_s(model: MadeUpModel, plan: GpuPlan, batch: int) -> float:
    """Return the seconds of a step of a worker's engine in which `batch` requests decode greedily:
    scheduling, forward and sampling. On a GPU the engine launches the next step ahead. Contexts start at
    three quarters of the plan's.
    """
    engine = Engine(model.config(batch, plan.context), speculate=BatchSpeculator)
    prompt_len, steps = plan.context * 3 // 4, plan.context // 16
    for number in range(batch):
        engine.add(
            EngineRequest(
                request_id=str(number),
                prompt_token_ids=[1 + (number + place) % 100 for place in range(prompt_len)],
                sampling=SamplingParams(
                    max_tokens=plan.context - prompt_len, temperature=0.0, ignore_eos=True
                ),
            )
        )
    try:
        while len(engine.step().outputs) < batch:  # until all prompts are computed
            if not engine.has_work():
                raise RuntimeError(f"{batch} requests never decoded together: --context is too short")
        started = time.perf_counter()
        for _ in range(steps):
            engine.step()
        return (time.perf_counter() - started) / steps
    finally:
        engine.close()
        del engine
        gc.collect()  # frees the pool


def speedup(results: Results, measured: Measured, acceptance: float) -> float:
    """Return the speedup from drafts of this length that cost nothing, over plain steps of the same batch."""
    plain = next(
        each for each in results.decode if each.sequences == measured.sequences and each.rows_each == 1
    )
    return tokens_of(measured.rows_each - 1, acceptance) * plain.device_s / measured.device_s
