"""What a GPU's largest step takes, on one that is not there."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from engine.activations import activation_bytes
from engine.kv_pool import KVPool
from engine.pool_layout import TARGET, Group, PoolLayout, Segment
from engine.rows import SequenceRows
from engine.runner import ForwardOutput


class Memory:
    """Of a GPU whose forwards take 100 bytes for each token and 10 for each row of logits. What the first one
    takes stays."""

    def __init__(self) -> None:
        self.allocated = self.peak = 1000
        self.emptied = 0

    def forward(self, tokens: int, rows: int) -> None:
        if self.allocated == 1000:
            self.allocated += 7
        self.peak = max(self.peak, self.allocated + 100 * tokens + 10 * rows)

    def reset_peak_memory_stats(self, device: torch.device) -> None:
        self.peak = self.allocated

    def memory_allocated(self, device: torch.device) -> int:
        return self.allocated

    def max_memory_allocated(self, device: torch.device) -> int:
        return self.peak

    def empty_cache(self) -> None:
        self.emptied += 1


class Runner:
    choice = products = ""
    any_threads = False

    def __init__(self, pool: KVPool, memory: Memory) -> None:
        self._num_blocks, self._memory = pool.num_blocks, memory

    def warm_up(self) -> float:
        raise AssertionError("this is only a trial")

    def run(self, batch: Sequence[SequenceRows], logit_rows: list[int], **options: object) -> ForwardOutput:
        (rows,) = batch
        (table,) = rows.tables
        assert len(table) == self._num_blocks == len(set(table))
        self._memory.forward(len(rows.token_ids), len(logit_rows))
        return ForwardOutput(torch.empty(len(logit_rows), 4), None)


def test_it_is_what_the_largest_forward_takes_beside_what_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = Memory()
    for name in ("reset_peak_memory_stats", "memory_allocated", "max_memory_allocated", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, getattr(memory, name))
    layout = PoolLayout((Group.uniform(TARGET, Segment(1, 1, 8, torch.float32)),), 16)
    device = torch.device("cpu")
    taken = activation_bytes(lambda pool: Runner(pool, memory), layout, device, num_tokens=40, rows=8)
    assert taken == 4080
    assert memory.emptied == 1
