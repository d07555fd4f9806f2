"""Models with recurrent layers with replayed steps, compared with launched ones (see `graphs.py`)."""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.batch.runner import Runner, Step
from engine.batch.step_inputs import SequenceRows, StepShape
from engine.copies import Downloader
from engine.devices.cuda.adapters import adapted_modules
from engine.devices.cuda.attention.backend import TritonBackend
from engine.devices.cuda.buckets import Buckets
from engine.devices.cuda.decoder import CudaDecoder
from engine.devices.cuda.recurrent import operators
from engine.devices.cuda.runner import CudaRunner
from engine.devices.loaded_model import LoadedModel
from engine.devices.step_runner import Forward
from engine.devices.torch import runner as forward
from engine.kv.layout import TARGET, PoolLayout
from engine.kv.pool import KVPool
from engine.kv.state_slots import StateSlots
from engine.load.loader import load_model
from engine.load.select import modules_runner
from engine.model.describe import describe
from engine.step.draft import LateTokens
from protocol.config import ServeConfig
from tests.e2e.architectures import write_model
from tests.engine.interpreted.recorder import RecordedGraphs

CPU = torch.device("cpu")
BLOCK, NUM_BLOCKS, NUM_SEATS, DRAFTS = 16, 18, 3, 8
SMALL = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1}
MODELS: dict[str, dict[str, Any]] = {
    "qwen3_5_text": {
        "num_hidden_layers": 2,
        "layer_types": ["linear_attention", "full_attention"],
        "linear_num_value_heads": 2,
        "linear_num_key_heads": 1,
    },
    "nemotron_h": {
        "num_hidden_layers": 3,
        "layer_types": ["linear_attention", "full_attention", "mlp"],
        "mamba_num_heads": 2,
        "n_groups": 1,
    },
}
"""With gated delta nets, and with Mamba2."""
DECODED = {"qwen3_5_text"}
"""These run by the CUDA decoder, the others by their own modules, as if no family described them."""
CHAINS = Buckets([3], [1, 4], [6], trees=False)
TREES = Buckets([2], [1, 5], [6], trees=True)

Case = tuple[list[SequenceRows], int]
"""A batch, and the number of graphs that it replays."""


@cache
def made(model_type: str) -> LoadedModel:
    with TemporaryDirectory() as folder:
        write_model(model_type, Path(folder), **SMALL, **MODELS[model_type])
        return load_model(ServeConfig(model=folder, dtype="float32", device="cpu", max_model_len=96))


class Side:
    """A runner with its own blocks and state slots. `graphs`: None, or `RecordedGraphs`."""

    def __init__(
        self, model_type: str, buckets: Buckets, graphs: Any = None, loaded: LoadedModel | None = None
    ) -> None:
        loaded = loaded or made(model_type)
        assert loaded.recurrent is not None
        self.pool = KVPool(PoolLayout((loaded.kv_group,), BLOCK), NUM_BLOCKS, CPU, None)
        self.state_slots = StateSlots(loaded.recurrent.state.with_drafts(DRAFTS), NUM_SEATS, CPU)
        self.backend = TritonBackend(self.pool.layers(TARGET))
        by_triton = operators.TritonOperators(self.state_slots)
        runs: Forward
        if model_type in DECODED:
            program, states = describe(loaded.model), self.state_slots.layout.layers
            runs = CudaDecoder(program, self.backend, 96, (1,), loaded.adapters, by_triton, states)
        else:
            by_address = None if loaded.adapters is None else adapted_modules(loaded.adapters)
            options = (1,), loaded.adapters, loaded.recurrent.hooks, by_triton, by_address
            runs = forward.Modules(loaded.model, self.backend, *options)
        self.cuda = CudaRunner(runs, self.backend, CPU, "", buckets, graphs)
        self.cuda.warm_up()
        self.runner: Runner = self.cuda

    def logits(self, batch: list[SequenceRows]) -> Tensor:
        """Return the logits of all rows."""
        return self.runner.run(Step(batch, range(num_rows(batch)))).logits.clone()

    @property
    def memory(self) -> list[Tensor]:
        """Return keys and values, states, and the inputs since the states."""
        block_pool = self.pool.memory.view(torch.float32)
        return [block_pool, *(part for layer in self.state_slots.layers for part in layer)]


class Modules(Side):
    """The same modules with the CPU's operators."""

    def __init__(self, model_type: str) -> None:
        super().__init__(model_type, CHAINS)
        self.runner = modules_runner(made(model_type), self.backend, state_slots=self.state_slots)


def num_rows(batch: list[SequenceRows]) -> int:
    return sum(len(rows.token_ids) for rows in batch)


def shape_of(buckets: Buckets, batch: list[SequenceRows]) -> StepShape | None:
    return buckets.shape_of(batch, num_rows(batch), BLOCK)


def rows_of(state_slot: int, start: int, count: int, certain: int | None = None) -> SequenceRows:
    """Return rows of a text, with other tokens after the first `certain` ones."""
    end = start + count
    wrong = range(end if certain is None else certain, end)
    tokens = [(7 * place + state_slot + 5 * (place in wrong)) % 290 + 3 for place in range(start, end)]
    return SequenceRows(tokens, start, [blocks_of(state_slot)], state_slot=state_slot, certain=certain)


def blocks_of(state_slot: int) -> list[int]:
    return list(range(6 * state_slot, 6 * state_slot + 6))


def tree(state_slot: int, start: int) -> SequenceRows:
    """Return a tree behind one committed token: a branch of three and a branch of one."""
    masks = [0b1, 0b11, 0b101, 0b1011, 0b11011]
    return SequenceRows(
        [9, 8, 7, 6, 5], start, [blocks_of(state_slot)], masks, state_slot=state_slot, certain=start + 1
    )


PROMPTS = [rows_of(0, 0, 13), rows_of(1, 0, 30), rows_of(2, 0, 5)]
STEPS: list[Case] = [
    (PROMPTS, 0),
    ([rows_of(0, 13, 1), rows_of(1, 30, 1)], 1),
    ([rows_of(1, 31, 1), rows_of(0, 14, 1), rows_of(2, 5, 1)], 1),
    ([rows_of(0, 15, 4, certain=16), rows_of(2, 6, 2, certain=7)], 1),
    ([rows_of(0, 16, 1), rows_of(1, 32, 4, certain=33), rows_of(2, 7, 3, certain=8)], 1),
    ([rows_of(2, 8, 6), rows_of(0, 17, 1)], 0),
    ([rows_of(2, 14, 4, certain=15)], 1),
    ([rows_of(2, 0, 1)], 1),
    ([rows_of(2, 1, 1), rows_of(1, 33, 1)], 1),
]
"""Prompts, and rows that share a step with one; decode rows and wrong drafts on both sides of grid points; a
state slot that another sequence takes over.
"""
TREE_STEPS: list[Case] = [
    (PROMPTS[:2], 0),
    ([rows_of(0, 13, 1)], 1),
    ([tree(0, 14), rows_of(1, 30, 1)], 1),
    ([tree(1, 31), tree(0, 15)], 1),
    ([rows_of(0, 16, 3, certain=17)], 1),
    ([rows_of(1, 32, 1), rows_of(0, 17, 1)], 1),
]


@pytest.mark.parametrize("model_type", MODELS)
@pytest.mark.parametrize(
    ("buckets", "steps"), [(CHAINS, STEPS), (TREES, TREE_STEPS)], ids=["chains", "trees"]
)
def test_a_replay_equals_the_launched_step(model_type: str, buckets: Buckets, steps: list[Case]) -> None:
    """It also equals other operators without padding: padding changes no row and no state."""
    graphs = RecordedGraphs()
    eager, replayed = Side(model_type, buckets), Side(model_type, buckets, graphs)
    modules = Modules(model_type)
    assert len(graphs.graphs) == len(list(buckets)) == 2
    for batch, replays in steps:
        before = sum(graph.num_replays for graph in graphs.graphs)
        expected, found, theirs = (side.logits(batch) for side in (eager, replayed, modules))
        assert torch.equal(found, expected)
        torch.testing.assert_close(found, theirs, atol=1e-4, rtol=1e-4)
        assert all(map(torch.equal, replayed.memory, eager.memory))
        for ours, others in zip(replayed.state_slots.layers, modules.state_slots.layers, strict=True):
            torch.testing.assert_close(ours[:2], others[:2], atol=1e-4, rtol=1e-4)
        assert sum(graph.num_replays for graph in graphs.graphs) - before == replays
        shape, hidden = shape_of(buckets, batch), replayed.cuda._kept[1]
        assert hidden is not None
        if shape is not None and model_type not in DECODED:  # which gives padding what memory has
            assert hidden[: shape.rows].isfinite().all()


def test_rows_run_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their states reach a grid point one step later, so a whole window without drafts lies behind them."""
    monkeypatch.setattr(sys.modules[__name__], "DRAFTS", 0)
    graphs, buckets = RecordedGraphs(), Buckets([2], [1], [6], trees=False)
    known, ahead = Side("qwen3_5_text", buckets), Side("qwen3_5_text", buckets, graphs)
    for side in (known, ahead):
        side.logits([rows_of(0, 0, 13), rows_of(1, 0, 30)])
    for start in range(13, 19):
        batch = [rows_of(0, start, 1), rows_of(1, start + 17, 1)]
        expected = known.logits(batch)
        chosen = LateTokens(torch.tensor([rows.token_ids[0] for rows in batch]), Downloader(CPU))
        named = [replace(rows, token_ids=[~i], certain=rows.start) for i, rows in enumerate(batch)]
        assert torch.equal(ahead.cuda.run(Step(named, [0, 1]), chosen.fill).logits, expected)
        points = [side.state_slots.position(0) for side in (known, ahead)]
        assert points == [(start + 1) // 16 * 16, start // 16 * 16]
    assert graphs.graphs[0].num_replays == 6
    assert torch.equal(known.pool.memory, ahead.pool.memory)
    for ours, others in zip(ahead.state_slots.layers, known.state_slots.layers, strict=True):
        assert all(map(torch.equal, ours[:2], others[:2]))


def test_drafted_tokens_known_only_to_the_device() -> None:
    """One row at a time, across a grid point, behind a state that no draft changes."""
    graphs = RecordedGraphs()
    drafting = Buckets([2], [1], [6], trees=False, drafts=True)
    eager, replayed = Side("qwen3_5_text", drafting), Side("qwen3_5_text", drafting, graphs)
    chosen = LateTokens(torch.tensor([9, 4]), Downloader(CPU))
    for side in (eager, replayed):
        side.logits([rows_of(0, 0, 14), rows_of(1, 0, 30)])
        side.logits([rows_of(0, 14, 1), rows_of(1, 30, 1)])
    states = [layer.state.clone() for layer in replayed.state_slots.layers]
    for start in range(15, 19):
        batch = [rows_of(0, start, 1, certain=15), rows_of(1, start + 16, 1, certain=31)]
        for place, rows in enumerate(batch):
            rows.token_ids = [~place]
        step = Step(batch, [0, 1])
        expected, found = (side.cuda.run(step, chosen.fill).logits for side in (eager, replayed))
        assert torch.equal(found, expected)
    assert graphs.graphs[0].num_replays == 5
    assert all(map(torch.equal, replayed.memory, eager.memory))
    for state, layer in zip(states, replayed.state_slots.layers, strict=True):
        assert torch.equal(layer.state[:2], state[:2])


def test_drafts_known_only_to_the_device() -> None:
    """Only the tokens are unknown to the host. States and results are the same."""
    told, learning = (Side("qwen3_5_text", CHAINS, RecordedGraphs()) for _ in range(2))
    for side in (told, learning):
        side.logits([rows_of(0, 0, 14), rows_of(1, 0, 30)])
    late = LateTokens(torch.tensor([9, 4, 7]), Downloader(CPU))
    known = [rows_of(0, 14, 3, certain=15), rows_of(1, 30, 2, certain=31)]
    drafted = [rows_of(0, 14, 3, certain=15), rows_of(1, 30, 2, certain=31)]
    for batch, ids in ((known, [9, 4, 7]), (drafted, [~0, ~1, ~2])):
        batch[0].token_ids = [*batch[0].token_ids[:1], *ids[:2]]
        batch[1].token_ids = [*batch[1].token_ids[:1], ids[2]]
    expected = told.cuda.run(Step(known, range(5)))
    found = learning.cuda.run(Step(drafted, range(5)), late.fill)
    assert all(map(torch.equal, found, expected))
    assert all(map(torch.equal, learning.memory, told.memory))
