"""Measures the GPU memory that the largest step takes in addition to the pool, before the pool is made."""

from __future__ import annotations

import gc
from collections.abc import Callable

import torch
from torch import Tensor

from engine.batch.rows import SequenceRows
from engine.batch.runner import Runner, Step
from engine.kv.layout import PoolLayout
from engine.kv.pool import KVPool

_FIRST_TOKENS = 2
"""The tokens of a first forward, not measured: what it allocates once is not a step's."""


def activation_bytes(
    make_runner: Callable[[KVPool], Runner],
    layout: PoolLayout,
    device: torch.device,
    num_tokens: int,
    rows: int,
    choose: Callable[[Tensor], object],
    adapter: int = 0,
) -> int:
    """Measure a forward of `num_tokens` prompt tokens with an `adapter`'s slot, and what `choose` does
    with the logits of `rows` of them.
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
