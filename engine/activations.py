"""What the largest step takes of a GPU's memory beside the pool: measured before the pool is made."""

from __future__ import annotations

import gc
from collections.abc import Callable

import torch
from torch import Tensor

from engine.kv_pool import KVPool
from engine.lora.runner import AdaptedRunner
from engine.pool_layout import PoolLayout
from engine.rows import SequenceRows
from engine.runner import Runner

_FIRST_TOKENS = 2
"""Of a forward before the measured one: what the first one takes and keeps is no step's."""


def activation_bytes(
    make_runner: Callable[[KVPool], Runner],
    layout: PoolLayout,
    device: torch.device,
    num_tokens: int,
    rows: int,
    choose: Callable[[Tensor], object],
) -> int:
    """Of a forward of `num_tokens` tokens of a prompt, and of what `choose` does with the logits of `rows`
    of them.
    """
    blocks = list(range(-(-num_tokens // layout.block_size)))
    tables = [blocks] * len(layout.windows)
    runner = make_runner(KVPool(layout, len(blocks), device, None))
    taken = max(_measure(each, tables, device, num_tokens, rows, choose) for each in _parts(runner))
    del runner
    gc.collect()
    torch.cuda.empty_cache()
    return taken


def _parts(runner: Runner) -> tuple[Runner, ...]:
    """Those that run whole steps."""
    return (runner.plain, runner.adapted) if isinstance(runner, AdaptedRunner) else (runner,)


@torch.inference_mode()
def _measure(
    runner: Runner,
    tables: list[list[int]],
    device: torch.device,
    num_tokens: int,
    rows: int,
    choose: Callable[[Tensor], object],
) -> int:
    for count in (_FIRST_TOKENS, num_tokens):
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        choose(runner.run([SequenceRows([0] * count, 0, tables)], list(range(min(rows, count)))).logits)
    return torch.cuda.max_memory_allocated(device) - before
