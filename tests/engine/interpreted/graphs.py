"""A CUDA decoder with replayed steps, compared with the same decoder launching them.

Graphs come from `recorder.py`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3Config

from engine.batch.runner import ForwardOutput, Runner, Step
from engine.batch.step_inputs import SequenceRows
from engine.copies import Downloader
from engine.devices.attention import TablesBackend
from engine.devices.cuda.attention.backend import TritonBackend
from engine.devices.cuda.buckets import Buckets
from engine.devices.cuda.decoder import CudaDecoder
from engine.devices.cuda.runner import CudaRunner
from engine.devices.torch import transformers_hook
from engine.devices.torch.runner import Modules, TorchRunner
from engine.kv.layout import TARGET, Group, PoolLayout, Segment
from engine.kv.pool import KVPool
from engine.model.describe import describe
from engine.step.draft import Draft, LateTokens, LateTrees
from tests.engine.interpreted.recorder import RecordedGraphs

CPU = torch.device("cpu")
BLOCK, NUM_BLOCKS = 16, 32
SHAPE = {
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "vocab_size": 60,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
}
KINDS = ["full_attention", "sliding_attention"]
WINDOWS = {"layer_types": KINDS, "use_sliding_window": True, "sliding_window": 20}
BUCKETS = Buckets([3], [1, 2], [2, 6], trees=False)
FEW_BUCKETS = Buckets([2], [1], [6], trees=False)
TREES = Buckets([2], [1, 3], [6], trees=True)


class Side:
    """A decoder with its own pool of the same values. `graphs`: None, or `RecordedGraphs`."""

    def __init__(self, model: PreTrainedModel, buckets: Buckets, graphs: Any, hidden: bool) -> None:
        self.pool = made_pool()
        backend = TritonBackend(self.pool.layers(TARGET))
        decoder = CudaDecoder(describe(model), backend, 128, (0, 2) if hidden else ())
        self.runner = CudaRunner(decoder, backend, CPU, "", buckets, graphs)
        self.runner.warm_up()

    def run(self, batch: list[SequenceRows], logit_rows: list[int]) -> ForwardOutput:
        output = self.runner.run(Step(batch, logit_rows))
        return ForwardOutput(output.logits.clone(), output.hidden)


def made_pool(num_layers: int = 2) -> KVPool:
    group = Group.uniform(TARGET, Segment(num_layers, 1, 16, torch.float32))
    pool = KVPool(PoolLayout((group,), BLOCK), NUM_BLOCKS, CPU, None)
    values = pool.memory.view(torch.float32)
    values.copy_(torch.randn(values.shape, generator=torch.Generator().manual_seed(2)))
    return pool


def made_model(**changes: Any) -> PreTrainedModel:
    transformers_hook.register()
    torch.manual_seed(1)
    config = Qwen3Config(**SHAPE | WINDOWS | changes)
    model = AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, attn_implementation=transformers_hook.NAME
    )
    return model.eval().requires_grad_(False)


def sides(buckets: Buckets, hidden: bool = False) -> tuple[Side, Side, RecordedGraphs]:
    graphs = RecordedGraphs()
    model = made_model()
    return Side(model, buckets, None, hidden), Side(model, buckets, graphs, hidden), graphs


def chain(number: int, start: int, *token_ids: int) -> SequenceRows:
    blocks = list(range(number * 6, number * 6 + 6))
    return SequenceRows(token_ids, start, [blocks[: (start + len(token_ids) - 1) // BLOCK + 1]])


def same(eager: Side, replayed: Side, batch: list[SequenceRows], logit_rows: list[int]) -> Tensor:
    theirs, ours = eager.run(batch, logit_rows), replayed.run(batch, logit_rows)
    assert torch.equal(ours.logits, theirs.logits)
    assert len(ours.logits) == len(logit_rows)
    if theirs.hidden is not None:
        assert ours.hidden is not None and torch.equal(ours.hidden, theirs.hidden)
    assert torch.equal(replayed.pool.memory, eager.pool.memory)
    return theirs.logits


STEPS: list[tuple[list[SequenceRows], list[int], int]] = [
    ([chain(0, 10, 3)], [0], 1),
    ([chain(0, 11, 4)], [0], 1),
    ([chain(1, 40, 5)], [0], 1),
    ([chain(0, 12, 6), chain(2, 3, 7)], [0, 1], 1),
    ([chain(1, 41, 8), chain(0, 13, 9), chain(2, 95, 1)], [0, 1, 2], 1),
    ([chain(1, 42, 1, 2)], [0, 1], 1),
    ([chain(0, 14, 4, 5), chain(1, 45, 6)], [0, 1, 2], 1),
    ([chain(0, 16, *range(1, 51))], [49], 0),
    ([chain(0, 20, 2), chain(1, 46, 3), chain(2, 4, 4), chain(3, 9, 5)], [0, 1, 2, 3], 0),
    ([chain(0, 21, 2)], [0], 1),
]
"""Steps and the number of graphs that each replays: alone and in batches, short and long, padded and not,
with drafts, and two that fit no bucket.
"""


def test_a_replay_equals_the_launched_step() -> None:
    """A step without its own graph replays a larger one, if there was time only for the largest of
    each kind.
    """
    eager, replayed, graphs = sides(BUCKETS)
    two_graphs = RecordedGraphs(2)
    larger = Side(made_model(), BUCKETS, two_graphs, False)
    assert len(graphs.graphs) == len(list(BUCKETS)) == 4 and len(two_graphs.graphs) == 2
    for batch, logit_rows, replays in STEPS:
        before = num_replays(graphs), num_replays(two_graphs)
        logits = same(eager, replayed, batch, logit_rows)
        torch.testing.assert_close(larger.run(batch, logit_rows).logits, logits, atol=1e-5, rtol=1e-5)
        assert num_replays(graphs) - before[0] == num_replays(two_graphs) - before[1] == replays
    torch.testing.assert_close(*(side.pool.memory.view(torch.float32) for side in (larger, eager)))


def num_replays(graphs: RecordedGraphs) -> int:
    return sum(graph.num_replays for graph in graphs.graphs)


def test_the_models_own_modules_over_two_block_tables() -> None:
    """Replayed, and launched without a bucket."""
    model, pools = made_model(), (made_pool(), made_pool())
    graphs: Any = RecordedGraphs()
    plain, replayed = (TablesBackend([TritonBackend(p.layers(TARGET)) for _ in "ab"], [0, 1]) for p in pools)
    runner = CudaRunner(Modules(model, replayed), replayed, CPU, "", FEW_BUCKETS, graphs)
    runner.warm_up()
    runners: list[Runner] = [runner, TorchRunner(Modules(model, plain), plain, CPU, "off", products="")]
    for batch, logit_rows, _ in (STEPS[3], STEPS[5]):
        moved = [replace(rows, tables=two_tables(rows.tables[0])) for rows in batch]
        found, expected = (each.run(Step(moved, logit_rows)).logits for each in runners)
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    assert num_replays(graphs) == 1
    torch.testing.assert_close(*(pool.memory.view(torch.float32) for pool in pools))


def two_tables(blocks: list[int]) -> list[list[int]]:
    return [blocks, [(block + 6) % 30 for block in blocks]]


def test_tokens_known_only_to_the_device() -> None:
    """Launched and replayed. Each row takes the token that it names, and a failed one takes any."""
    late = LateTokens(torch.tensor([3, -1, 9]), Downloader(CPU))
    for side in sides(FEW_BUCKETS)[:2]:
        named = [chain(0, 10, ~2), chain(1, 40, ~0)]
        expected = side.run([chain(0, 10, 9), chain(1, 40, 3)], [0, 1]).logits
        kv = side.pool.memory.clone()
        found, _ = side.runner.run(Step(named, [0, 1]), late.fill)
        assert torch.equal(found, expected)
        assert torch.equal(side.pool.memory, kv)
        failed, _ = side.runner.run(Step([chain(0, 10, ~1)], [0]), late.fill)
        assert failed.isfinite().all()


def test_drafts_known_only_to_the_device() -> None:
    """Launched and replayed, beside rows whose tokens the host knows."""
    late = LateTokens(torch.tensor([8, 5, 0]), Downloader(CPU))
    for side in sides(BUCKETS, hidden=True)[:2]:
        expected = side.run([chain(0, 14, 4, 5), chain(1, 45, 6), chain(2, 30, 0, 8)], [*range(5)])
        kv = side.pool.memory.clone()
        batch = [chain(0, 14, 4, ~1), chain(1, 45, 6), chain(2, 30, ~2, ~0)]
        found = side.runner.run(Step(batch, range(5)), late.fill)
        assert all(map(torch.equal, found, expected))
        assert side.runner.run(Step(batch, range(5), wants_hidden=False), late.fill).hidden is None
        assert torch.equal(side.pool.memory, kv)


def test_trees_whose_shape_is_known_only_to_the_device() -> None:
    """Launched and replayed, beside a chain. The tree's last row is none of its nodes."""
    nodes = torch.tensor([[8, 5, 6, 9], [0, 1, 1, -1], [0b11, 0b111, 0b1011, 0b10001], [0, 1, 1, 0]])
    late = LateTrees(nodes, Downloader(CPU))
    known = chain(0, 28, 4, 8, 5, 6, 9)
    known.masks = [0b1, *nodes[2].tolist()]
    star = chain(0, 28, 4, *(~node for node in range(4)))
    star.masks = Draft([8] * 4, [-1] * 4).masks()
    for side in sides(Buckets([2], [1, 5], [6], trees=True), hidden=True)[:2]:
        expected = side.run([known, chain(1, 45, 6, 3)], [*range(7)])
        kv = side.pool.memory.clone()
        found = side.runner.run(Step([star, chain(1, 45, 6, 3)], range(7)), late.fill)
        assert all(map(torch.equal, found, expected))
        assert torch.equal(side.pool.memory, kv)


def test_hidden_states_are_kept_from_the_next_replay() -> None:
    eager, replayed, _ = sides(FEW_BUCKETS, hidden=True)
    batch, logit_rows, _ = STEPS[3]
    same(eager, replayed, batch, logit_rows)
    kept = replayed.run(batch, logit_rows).hidden
    assert kept is not None
    copy = kept.clone()
    same(eager, replayed, [chain(0, 14, 4), chain(1, 45, 6)], [0, 1])
    assert torch.equal(kept, copy)


def test_trees() -> None:
    eager, replayed, graphs = sides(TREES)
    tree = SequenceRows([5, 6, 7], 20, [[1, 2]], [0b1, 0b11, 0b101])
    for batch in ([tree], [chain(1, 40, 3), tree], [chain(1, 41, 3, 4)]):
        rows = sum(len(each.token_ids) for each in batch)
        same(eager, replayed, batch, list(range(rows)))
    assert num_replays(graphs) == 3
