"""Trees that the device grows are those that the host grows, node for node and row for row."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from engine.download import Downloader
from engine.draft import Draft
from engine.late_trees import LateTrees
from engine.upload import upload_to
from speculation.tree import DraftTrees, TreeRows
from speculation.tree_growth import TreeGrowth

CPU = torch.device("cpu")
VOCAB = 6
Path = tuple[int, ...]
KINDS = ["random", "ties", "few", "none"]


def scores_after(path: Path, seed: int, kind: str) -> Tensor:
    """float32 [VOCAB], of a model for the tests."""
    generator = torch.Generator().manual_seed(random.Random(f"{seed} {path}").getrandbits(40))
    scores = (torch.randn(VOCAB, generator=generator) * 1.5).log_softmax(0)
    if kind == "ties":
        scores = scores.round().clamp_max(-1.0)
    if kind == "few":
        scores[torch.rand(VOCAB, generator=generator) < 0.6] = -math.inf
    if kind == "none" or (kind == "few" and len(path) == seed % 4):
        scores[:] = math.nan if seed % 2 else -math.inf
    return scores


class Trees:
    """Of a batch: the paths to their rows, and those that were run last, with None for padding."""

    def __init__(self, count: int, seed: int, kind: str) -> None:
        self.paths: list[list[Path]] = [[()] for _ in range(count)]
        self.newest: list[tuple[int, Path] | None] = [(tree, ()) for tree in range(count)]
        self._seed, self._kind = seed, kind

    def ranked(self) -> tuple[Tensor, Tensor]:
        scores = [
            torch.randn(VOCAB) if each is None else scores_after(each[1], self._seed + each[0], self._kind)
            for each in self.newest
        ]
        return torch.stack(scores), torch.arange(VOCAB).flip(0).expand(len(scores), -1)

    def run(self, tree: int, tokens: Sequence[int], parents: Sequence[int]) -> None:
        paths = self.paths[tree]
        paths += [(*paths[parent], token) for parent, token in zip(parents, tokens, strict=True)]


def by_host(
    max_nodes: list[int], depth: int, width: int, seed: int, kind: str
) -> tuple[list[Draft | None], list[list[TreeRows]]]:
    trees, state = DraftTrees(max_nodes, depth, width, Downloader(CPU)), Trees(len(max_nodes), seed, kind)
    rounds: list[list[TreeRows]] = []
    while state.newest:
        rounds.append(trees.grow(*state.ranked()))
        for tree, rows in enumerate(rounds[-1]):
            state.run(tree, rows.token_ids, rows.parents)
        state.newest = [
            (t, path) for t, rows in enumerate(rounds[-1]) for path in state.paths[t][rows.first :]
        ]
    return trees.drafts(), rounds


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("max_nodes", "depth", "width"),
    [([24, 24], 6, 4), ([63, 40, 9], 8, 5), ([7, 3, 2, 1], 5, 4), ([1], 4, 4), ([10, 2], 1, 4), ([6], 9, 1)],
)
def test_trees_are_those_of_the_host(max_nodes: list[int], depth: int, width: int, kind: str) -> None:
    for seed in range(6):
        expected, rounds = by_host(max_nodes, depth, width, seed, kind)
        growth = TreeGrowth(max_nodes, width, 16, upload_to(CPU))
        state = Trees(len(max_nodes), seed, kind)
        for number in range(min(depth - 1, max_nodes[0])):
            level, sources = growth.grow(*state.ranked())
            told = rounds[number] if number < len(rounds) else [TreeRows(first=0) for _ in max_nodes]
            before, state.newest = state.newest, []
            row, each_has = 0, len(sources) // len(max_nodes)
            for tree, rows in enumerate(told):
                end = row + len(rows.token_ids)
                tokens, masks, numbers, owners = level.rows[:, row:end].tolist()
                assert (tokens, masks, owners) == (rows.token_ids, rows.masks, [tree] * len(tokens))
                assert numbers == [*range(rows.first, rows.first + len(tokens))]
                state.run(tree, tokens, rows.parents)
                paths = [(tree, state.paths[tree][row]) for row in numbers]
                assert [before[source] for source in sources[row:end]] == [
                    (t, path[:-1]) for t, path in paths
                ]
                assert level.logit_rows[each_has * tree :][: len(tokens)].tolist() == [*range(row, end)]
                assert (level.ends[tree], level.sizes[tree]) == (end, len(state.paths[tree]))
                state.newest += [*paths, *[None] * (each_has - len(tokens))]
                row = end
            assert (level.rows[2, row:] == -1).all()
            assert level.depth == number + 1
        found = drafts_of(growth.end(*state.ranked()), max_nodes)
        for theirs, ours in zip(expected, found, strict=True):
            theirs = theirs or Draft([], [])
            assert ours.parents == theirs.parents
            assert ours.token_ids[: ours.num_nodes] == theirs.token_ids
            assert ours.depths() == theirs.depths()


def drafts_of(nodes: Tensor, max_nodes: Sequence[int]) -> list[Draft]:
    """What the host learns, where the device had it right meanwhile."""
    late, most = LateTrees(nodes, Downloader(CPU)), max_nodes[0]
    drafts = [
        Draft([~(tree * most + i) for i in range(count)], [-1] * count, late=late)
        for tree, count in enumerate(max_nodes)
    ]
    for tree, draft in enumerate(drafts):
        names = torch.tensor(draft.ids)
        places = slice(tree * most, tree * most + len(names))
        draft.settle()
        masks, further = nodes[2, places].tolist(), late.further(names).tolist()
        assert [mask % (1 << 64) for mask in masks] == draft.masks()[1:]  # type: ignore[index]
        assert further[: draft.num_nodes] == [depth - 1 for depth in draft.depths()]
        assert further[draft.num_nodes :] == [0] * len(draft.probes)
    return drafts
