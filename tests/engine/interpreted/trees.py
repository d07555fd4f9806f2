"""Trees grown on the device equal trees grown on the host, node for node and row for row."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from engine.batch.step_inputs import BlockTable, SequenceRows, StepInputs, StepShape, step_inputs
from engine.copies import Downloader, upload_to
from engine.step.draft import Draft, LateTrees
from speculation import tree_growth
from speculation.chains import DraftRows
from speculation.tree_growth import GrowthState, TreeGrowth, TreeLevel
from tests.speculation.host_trees import Path, best_after, extend, grow_trees

CPU = torch.device("cpu")
VOCAB, BLOCK = 6, 4
PADDING = -1
"""The tree of rows that only pad a level."""
KINDS = ["random", "ties", "close", "few", "none"]


def scores_after(path: Path, seed: int, kind: str) -> Tensor:
    """Return a test model's scores, float32 [VOCAB]."""
    generator = torch.Generator().manual_seed(random.Random(f"{seed} {path}").getrandbits(40))
    scores = (torch.randn(VOCAB, generator=generator) * 1.5).log_softmax(0)
    if kind == "ties":
        scores = scores.round().clamp_max(-1.0)
    if kind == "close":  # float32 has equal sums for them
        scores = -1 - torch.randint(4, (VOCAB,), generator=generator) * 2**-23
    if kind == "few":
        scores[torch.rand(VOCAB, generator=generator) < 0.6] = -math.inf
    if kind == "none" or (kind == "few" and len(path) == seed % 4):
        scores[:] = math.nan if seed % 2 else -math.inf
    return scores


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("max_nodes", "depth", "width"),
    [([24, 24], 6, 4), ([63, 40, 9], 8, 5), ([7, 3, 2, 1], 5, 4), ([1], 4, 4), ([10, 2], 1, 4), ([6], 9, 1)],
)
def test_trees_equal_the_hosts(max_nodes: list[int], depth: int, width: int, kind: str) -> None:
    count, tokens = len(max_nodes), torch.arange(VOCAB).flip(0)
    for seed in (0, 3):

        def after(tree: int, path: Path, seed: int = seed) -> tuple[Tensor, Tensor]:
            scores = scores_after(path, seed + tree, kind) if tree >= 0 else torch.randn(VOCAB)
            return scores, tokens

        expected, levels = grow_trees(max_nodes, depth, width, after)
        growth = TreeGrowth(max_nodes, width, BLOCK, upload_to(CPU), by_kernels=True)
        steps, paths = Steps(max_nodes, num_tables=1 + seed % 2), [[Path()] for _ in max_nodes]
        newest: list[tuple[int, Path]] = [(tree, ()) for tree in range(count)]
        for number in range(min(depth - 1, max_nodes[0])):
            level = growth.grow(*best_after(newest, width, after))
            assert level.num_rows <= min(width, max_nodes[0])
            nothing = [DraftRows(0, [], []) for _ in max_nodes]
            told = levels[number] if number < len(levels) else nothing
            found = steps.unknown(level, max_nodes)
            level.fill(found)
            steps.check(found, told, [len(its) for its in paths], level.num_rows)
            sources = level.before(torch.arange(len(newest)).unsqueeze(1)).flatten().tolist()
            before, newest = newest, []
            for tree, rows in enumerate(told):
                extend(paths[tree], rows)
                grown = paths[tree][rows.first :] if rows.token_ids else []
                followed = [before[sources.pop(0)] for _ in grown]
                assert followed == [(tree, path[:-1]) for path in grown]
                newest += [(tree, path) for path in grown]
                newest += [(PADDING, ())] * (level.num_rows - len(grown))
        nodes = growth.end(*best_after(newest, width, after))
        drafts = late_drafts(nodes.flatten(1), max_nodes)
        for theirs, ours in zip(expected, drafts, strict=True):
            theirs = theirs or Draft([], [])
            assert ours.parents == theirs.parents
            assert ours.token_ids[: ours.num_nodes] == theirs.token_ids
            assert ours.depths() == theirs.depths()


class Steps:
    """The steps of a batch in a bucket's shape, with varying first blocks and places."""

    def __init__(self, max_nodes: Sequence[int], num_tables: int) -> None:
        self._roots = [5 + 4 * tree for tree in range(len(max_nodes))]
        self._table = BlockTable(BLOCK, num_tables=num_tables)
        numbers = iter(random.Random(0).sample(range(1000), 1000))
        self._blocks = [
            [[next(numbers) for _ in range((root + limit) // BLOCK + 1)] for _ in range(num_tables)]
            for root, limit in zip(self._roots, max_nodes, strict=True)
        ]
        self._max_nodes = max_nodes

    def unknown(self, level: TreeLevel, max_nodes: Sequence[int]) -> StepInputs:
        grown = level.unknown_rows(max_nodes)
        return self._inputs(grown, [0] * level.num_rows * len(grown), padding=3)

    def _inputs(self, grown: Sequence[DraftRows], logit_rows: list[int], padding: int = 0) -> StepInputs:
        batch = [
            SequenceRows(rows.token_ids, root + rows.first, tables, rows.masks, root)
            for rows, tables, root in zip(grown, self._blocks, self._roots, strict=True)
            if rows.token_ids
        ]
        count = sum(len(rows.token_ids) for rows in batch)
        shape = StepShape(rows=count + padding, sequences=len(batch) + padding, trees=True)
        return step_inputs(batch, logit_rows, upload_to(CPU), self._table, shape)

    def check(
        self, found: StepInputs, told: Sequence[DraftRows], sizes: Sequence[int], each_has: int
    ) -> None:
        """Compare with the host's layout for trees with rows of these `sizes`."""
        expected, ours = self._inputs(told, []), found.attention
        theirs, counts = expected.attention, [len(rows.token_ids) for rows in told]
        end, num_trees, num_rows = sum(counts), len(told), each_has * len(told)
        assert torch.equal(found.token_ids[:end], expected.token_ids)
        assert torch.equal(found.positions[:end], expected.positions)
        last = max(root + limit for root, limit in zip(self._roots, self._max_nodes, strict=True))
        assert int(found.positions.max()) <= last  # models have no rotations for more
        assert ours.visible is not None and theirs.visible is not None
        assert torch.equal(ours.visible[:end], theirs.visible)
        assert torch.equal(ours.slot_mapping[..., :end], theirs.slot_mapping)
        assert (ours.slot_mapping[..., end:] == -1).all()
        ends = [sum(counts[: tree + 1]) for tree in range(num_trees)]
        assert ours.query_start.tolist() == [0, *ends, *[num_rows] * (len(ours.context_len) - num_trees)]
        assert ours.context_len[:num_trees].tolist() == [
            root + size + count for root, size, count in zip(self._roots, sizes, counts, strict=True)
        ]
        for tree, (stop, count) in enumerate(zip(ends, counts, strict=True)):
            wanted = found.logit_rows[each_has * tree :][:each_has].tolist()
            assert wanted[:count] == [*range(stop - count, stop)]
            assert all(row == max(stop - 1, 0) for row in wanted[count:])
        assert ours.max_context_len >= theirs.max_context_len


def late_drafts(nodes: Tensor, max_nodes: Sequence[int]) -> list[Draft]:
    """Return the drafts that the host learns, from the device's correct nodes."""
    late, most = LateTrees(nodes, Downloader(CPU)), max_nodes[0]
    drafts = [
        Draft([~(tree * most + i) for i in range(count)], [-1] * count, late=late)
        for tree, count in enumerate(max_nodes)
    ]
    for tree, draft in enumerate(drafts):
        names = torch.tensor(draft.ids)
        places = slice(tree * most, tree * most + len(names))
        draft.settle()
        masks, offsets = nodes[2, places].tolist(), late.depth_offsets(names).tolist()
        settled = draft.masks()
        assert settled is not None
        assert [mask % (1 << 64) for mask in masks] == settled[1:]
        assert offsets[: draft.num_nodes] == [depth - 1 for depth in draft.depths()]
        assert offsets[draft.num_nodes :] == [0] * len(draft.probes)
    return drafts


def test_rows_of_several_trees() -> None:
    """They follow one another, and so do the hidden states of their parents."""
    count, width = 150, 3
    state, rng = GrowthState.of(count, 4, width, CPU), random.Random(3)
    counts = [rng.randrange(width + 1) for _ in range(count)]
    state.runs.copy_(torch.tensor([[each + 1, each] for each in counts]))
    state.nodes.copy_(torch.arange(state.nodes.numel()).view(state.nodes.shape))
    state.sources.copy_(torch.randint(2, state.sources.shape))
    level = TreeLevel(state, num_rows=width, num_before=2, depth=2, block_size=BLOCK)
    batch = [SequenceRows([0] * width, 0, [[0, 1, 2]], [1] * width, 3) for _ in range(count)]
    found = step_inputs(batch, [0] * width * count, upload_to(CPU), BlockTable(BLOCK), StepShape())
    level.fill(found)
    places = [(tree, row) for tree in range(count) for row in range(counts[tree])]
    assert found.token_ids[: len(places)].tolist() == [4 * tree + 1 + row for tree, row in places]
    hidden = torch.randn(2 * count, 2 * tree_growth._TILE)[:, : tree_growth._TILE + 5]
    followed = [2 * tree + int(state.sources[tree, row]) for tree, row in places]
    assert torch.equal(level.before(hidden)[: len(places)], hidden[followed])
