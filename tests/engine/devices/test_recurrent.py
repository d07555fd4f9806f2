"""Results and bits of the operators of recurrent layers."""

from __future__ import annotations

import random

import pytest
import torch

from engine.batch.runner import StepOperators
from engine.devices.cpu.recurrent.native import CpuOperators
from engine.devices.torch.recurrent import TorchOperators
from engine.engine import Engine
from engine.kv.state_slots import GRID, RowSpan, StateLayout, StateSlots
from tests.engine.recurrent_texts import LAYERS, Text, drafted, served, served_ahead, token_by_token

MATES = 2


@pytest.mark.parametrize("kind", [TorchOperators, CpuOperators])
@pytest.mark.parametrize("rule", LAYERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_are_right_and_have_the_same_bits_in_any_chunks_and_batch(
    kind: type[StepOperators], rule: str, dtype: torch.dtype
) -> None:
    texts = [Text(seed, rule, dtype) for seed in range(1 + MATES)]
    alone = served(kind, texts[:1], None)[0]
    for got, exact in zip(alone, token_by_token(texts[0]), strict=True):
        torch.testing.assert_close(got.double(), exact, rtol=1e-4, atol=1e-5)
    for seed in range(4):
        crowd = served(kind, texts, random.Random(seed))[0]
        assert all(torch.equal(one, other) for one, other in zip(alone, crowd, strict=True))


@pytest.mark.parametrize("kind", [TorchOperators, CpuOperators])
@pytest.mark.parametrize("rule", LAYERS)
@pytest.mark.parametrize("trees", [False, True])
def test_drafted_rows_have_the_bits_of_committed_ones_and_leave_nothing_behind(
    kind: type[StepOperators], rule: str, trees: bool
) -> None:
    """Drafts cross two grid points, first right and then wrong. Some of the right ones are kept."""
    text = Text(0, rule, torch.bfloat16)
    whole = served(kind, [text], None)[0]
    assert sum(drafted(kind, text, whole, random.Random(seed), trees) for seed in range(6)) > 100


@pytest.mark.parametrize("kind", [TorchOperators, CpuOperators])
@pytest.mark.parametrize("rule", LAYERS)
def test_rows_run_ahead_have_the_bits_of_committed_ones(kind: type[StepOperators], rule: str) -> None:
    text = Text(0, rule, torch.bfloat16)
    whole = served(kind, [text], None)[0]
    for seed in range(4):
        assert all(map(torch.equal, served_ahead(kind, text, random.Random(seed)), whole))


def test_a_state_that_decays_to_almost_nothing_has_no_denormal_numbers() -> None:
    """A CPU takes a hundred times as long for denormal numbers."""
    text = Text(0, "sum", torch.float32)
    state_slots = StateSlots(StateLayout((text.layer,), torch.float32), 1, torch.device("cpu"))
    operators = CpuOperators(state_slots)
    operators.begin_step([RowSpan(0, 0, 2 * GRID, 2 * GRID)])
    _, query, key, value, decay = text.rows(0, 2 * GRID)
    value[GRID:] = 0
    operators.linear_attention(0, query, key, value, 100 * decay, None)
    states = state_slots.layers[0].state.abs()
    assert (states[states > 0] >= torch.finfo(torch.float32).tiny).all()


def assert_empty(engine: Engine) -> None:
    assert engine.blocks.available == engine.blocks.num_blocks
    assert engine.pool.state_slots is not None
    assert sorted(engine.pool.state_slots._free) == list(range(engine.config.max_num_seqs))


def room_of(engine: Engine, num_blocks: int) -> int:
    """Return the bytes for such an engine's state slots and `num_blocks` blocks."""
    state_slots, count = engine.pool.state_slots, engine.config.max_num_seqs
    assert state_slots is not None and count is not None
    return count * state_slots.layout.state_slot_bytes + num_blocks * engine.pool.memory.shape[1]
