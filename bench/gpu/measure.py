"""Measurements of forwards and engine steps."""

from __future__ import annotations

import gc
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from bench.gpu.clock import launches_of, time_of
from bench.gpu.kernels import KernelComparison, kernels_beside
from bench.gpu.model import BLOCK_SIZE, Forwards, MadeUpModel
from bench.gpu.roofline import StepCost, tokens_of
from engine.engine import Engine
from engine.triton_support import Compilations
from protocol.config import ServeConfig
from protocol.requests import EngineRequest
from protocol.sampling import SamplingParams
from protocol.speculation import MAX_DRAFT_TOKENS, SpeculativeConfig
from speculation.speculator import BatchSpeculator

_GREEDY: Mapping[str, Any] = {"temperature": 0.0}
_SAMPLED: Mapping[str, Any] = {"temperature": 0.8, "top_k": 50, "top_p": 0.95}


@dataclass(frozen=True)
class GpuPlan:
    batches: Sequence[int]
    drafted: Sequence[int]
    chunks: Sequence[int]
    context: int
    acceptance: float
    long_context: int = 0
    """Length of the one long sequence in the largest batch; 0 for none."""
    budget: int = 2048
    """Tokens of a prompt in a step."""

    @property
    def longest(self) -> int:
        """Return the length of the longest sequence."""
        return max(self.context, self.long_context, *self.chunks)

    @property
    def num_tokens(self) -> int:
        """Return the number of tokens that the pool must hold."""
        return max(self.batches) * (self.context + BLOCK_SIZE) + self.longest + BLOCK_SIZE

    @property
    def mixed_contexts(self) -> list[int]:
        return [*[self.context] * (max(self.batches) - 1), self.long_context]


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


def forward(model: MadeUpModel, forwards: Forwards, contexts: Sequence[int], rows: int) -> Measured:
    """Measure a forward, with logits for all rows of a verified draft, or for the last row of a chunk."""
    logits = 1 if rows > MAX_DRAFT_TOKENS else rows
    run = partial(forwards.run, forwards.batch(contexts, rows), logits)
    taken = time_of(run, model.device)
    mean = sum(contexts) // len(contexts)
    work = model.costs.step(len(contexts), rows, mean, logits)
    return Measured(len(contexts), rows, max(contexts), *taken, launches_of(run, model.device), work)


@dataclass(frozen=True)
class Results:
    """The measurements. `decode` and `prefill` are forwards; `steps` maps a number of sequences to the
    seconds of an engine step; `eager_s` has the seconds of `decode`'s forwards without CUDA graphs.
    """

    choice: str
    decode: list[Measured]
    prefill: list[Measured]
    steps: dict[int, float]
    eager_s: list[float]
    sampled_steps: dict[int, float] = field(default_factory=dict)
    """Like `steps`, with top-k and top-p."""
    mixed: Measured | None = None
    """The largest batch with one long sequence."""
    cut_s: dict[int, float] = field(default_factory=dict)
    """Seconds of prompts in chunks of the budget, by number of tokens."""
    kernels: list[KernelComparison] = field(default_factory=list)
    compilations: dict[str, float] = field(default_factory=dict)
    """Kernels compiled after the warm-up: their number, and the seconds that this took."""


def measure(model: MadeUpModel, plan: GpuPlan) -> Results:
    forwards = model.forwards(plan.num_tokens, _config(plan, True))
    eager = [each.device_s for each in _decode(model, forwards, plan)]
    del forwards
    gc.collect()  # frees its pool for the next one
    forwards = model.forwards(plan.num_tokens, _config(plan, False))
    compilations = Compilations() if model.device.type == "cuda" else None
    decode = _decode(model, forwards, plan)
    mixed = forward(model, forwards, plan.mixed_contexts, 1) if plan.long_context else None
    prefill = [forward(model, forwards, [chunk], chunk) for chunk in plan.chunks]
    cut = {chunk: _cut_s(model, forwards, chunk, plan) for chunk in plan.chunks if chunk > plan.budget}
    compiled = {} if compilations is None else compilations.totals()
    choice = forwards.choice
    del forwards
    gc.collect()  # frees its pool for the engines
    steps = {batch: _step_s(model, plan, batch, _GREEDY) for batch in plan.batches}
    sampled = {batch: _step_s(model, plan, batch, _SAMPLED) for batch in plan.batches}
    kernels = [*kernels_beside(model.shape, model.device, plan.longest)]
    return Results(choice, decode, prefill, steps, eager, sampled, mixed, cut, kernels, compiled)


def _cut_s(model: MadeUpModel, forwards: Forwards, prompt: int, plan: GpuPlan) -> float:
    """Return the seconds of a prompt in chunks of the budget."""
    ends = [*range(plan.budget, prompt, plan.budget), prompt]
    rows = [end - start for start, end in zip([0, *ends], ends, strict=False)]
    return sum(forward(model, forwards, [end], count).device_s for end, count in zip(ends, rows, strict=True))


def _decode(model: MadeUpModel, forwards: Forwards, plan: GpuPlan) -> list[Measured]:
    rows = [1 + drafted for drafted in plan.drafted]
    contexts = [[plan.context] * batch for batch in plan.batches]
    return [forward(model, forwards, each, count) for each in contexts for count in rows]


def _config(plan: GpuPlan, enforce_eager: bool) -> ServeConfig:
    drafted = min(max(plan.drafted), MAX_DRAFT_TOKENS)
    return ServeConfig(
        max_num_seqs=max(plan.batches),
        speculative_config=SpeculativeConfig(method="ngram", num_speculative_tokens=drafted),
        enforce_eager=enforce_eager,
    )


def _step_s(model: MadeUpModel, plan: GpuPlan, batch: int, how: Mapping[str, Any]) -> float:
    """Return the seconds of a step of a worker's engine in which `batch` requests decode: scheduling, forward
    and sampling. On a GPU the engine launches the next step ahead. Contexts start at three quarters of the
    plan's.
    """
    engine = Engine(model.config(batch, plan.context), speculate=BatchSpeculator)
    prompt_len, steps = plan.context * 3 // 4, plan.context // 16
    for number in range(batch):
        engine.add(
            EngineRequest(
                request_id=str(number),
                prompt_token_ids=[1 + (number + place) % 100 for place in range(prompt_len)],
                sampling=SamplingParams(max_tokens=plan.context - prompt_len, ignore_eos=True, **how),
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
    """Return the speedup over plain steps of the same batch if drafts of this length cost nothing."""
    plain = next(
        each for each in results.decode if each.sequences == measured.sequences and each.rows_each == 1
    )
    return tokens_of(measured.rows_each - 1, acceptance) * plain.device_s / measured.device_s
