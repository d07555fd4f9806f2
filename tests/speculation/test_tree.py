"""Draft trees over a table of probabilities have valid shapes and contain the likeliest paths."""

from __future__ import annotations

import math
import random

import pytest
import torch
from torch import Tensor

from engine.step.draft import Draft
from speculation.chains import DraftRows
from tests.speculation.host_trees import grow_trees

VOCAB_SIZE = 5


def log_probs_after(path: tuple[int, ...], seed: int) -> Tensor:
    """Return log-probabilities [vocab_size] after a path from the root."""
    generator = torch.Generator().manual_seed(random.Random(f"{seed} {path}").getrandbits(40))
    return (torch.randn(VOCAB_SIZE, generator=generator) * 1.5).log_softmax(0)


def score_of(path: tuple[int, ...], seed: int) -> float:
    return sum(float(log_probs_after(path[:i], seed)[token]) for i, token in enumerate(path))


def path_to(draft: Draft, node: int) -> tuple[int, ...]:
    return () if node < 0 else (*path_to(draft, draft.parent(node)), draft.token_ids[node])


def grow_all(
    seeds: list[int], max_nodes: list[int], depth: int, width: int
) -> tuple[list[Draft], list[list[DraftRows]]]:
    """Return the drafts, and the rows of all levels."""
    tokens = torch.arange(VOCAB_SIZE)
    drafts, levels = grow_trees(
        max_nodes, depth, width, lambda tree, path: (log_probs_after(path, seeds[tree]), tokens)
    )
    assert all(draft is not None for draft in drafts)
    return [draft for draft in drafts if draft is not None], levels


@pytest.mark.parametrize(("max_nodes", "depth", "width"), [(24, 5, 4), (63, 8, 5), (3, 8, 4), (10, 1, 4)])
def test_rows_agree_with_nodes(max_nodes: int, depth: int, width: int) -> None:
    (draft,), levels = grow_all([1], [max_nodes], depth, width)
    assert draft.parents is not None and draft.num_nodes <= max_nodes
    assert all(parent < node for node, parent in enumerate(draft.parents))
    children = list(zip(draft.parents, draft.token_ids, strict=True))
    assert len(set(children)) == len(children)
    assert max(len(path_to(draft, node)) for node in range(draft.num_nodes)) <= depth
    masks = draft.masks()
    assert masks is not None
    row = 1
    for number, (rows,) in enumerate(levels):
        assert len(rows.token_ids) <= width and rows.masks is not None
        for token, mask in zip(rows.token_ids, rows.masks, strict=True):
            assert (token, mask) == (draft.token_ids[row - 1], masks[row])
            assert number + 1 == len(path_to(draft, row - 1))
            row += 1
    assert row - 1 <= draft.num_nodes


@pytest.mark.parametrize("seed", range(8))
def test_the_likeliest_paths_are_in_the_tree(seed: int) -> None:
    """It has all nodes that were run and the likeliest known others, which is nearly the best tree."""
    depth, max_nodes = 4, 12
    (draft,), levels = grow_all([seed], [max_nodes], depth, width=VOCAB_SIZE)
    nodes = [path_to(draft, node) for node in range(draft.num_nodes)]
    num_run = sum(len(rows.token_ids) for (rows,) in levels)
    run, leaves = nodes[:num_run], nodes[num_run:]
    known = {(*path, token) for path in [(), *run] for token in range(VOCAB_SIZE)} - set(run)
    assert leaves == likeliest(known, seed, max_nodes - num_run)
    every: list[tuple[int, ...]] = [()]
    for path in every:
        if len(path) < depth:
            every += [(*path, token) for token in range(VOCAB_SIZE)]
    best = likeliest(set(every[1:]), seed, max_nodes)
    assert expected_length(nodes, seed) > 0.9 * expected_length(best, seed)


def likeliest(paths: set[tuple[int, ...]], seed: int, count: int) -> list[tuple[int, ...]]:
    return sorted(paths, key=lambda path: score_of(path, seed), reverse=True)[:count]


def expected_length(paths: list[tuple[int, ...]], seed: int) -> float:
    return sum(math.exp(score_of(path, seed)) for path in paths)


def test_a_batch_grows_each_tree_independently() -> None:
    together, _ = grow_all([1, 2, 3], [20, 5, 1], depth=5, width=3)
    for index, (seed, limit) in enumerate([(1, 20), (2, 5), (3, 1)]):
        (alone,), _ = grow_all([seed], [limit], depth=5, width=3)
        assert (alone.token_ids, alone.parents) == (together[index].token_ids, together[index].parents)


def test_impossible_tokens_are_not_drafted() -> None:
    def after(tree: int, path: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        scores = torch.full((VOCAB_SIZE,), math.nan if tree else -math.inf)
        if not (tree or path):
            scores[2] = 0.0
        return scores, torch.arange(10, 10 + VOCAB_SIZE)

    (draft, none), (level, *_) = grow_trees([8, 8], 3, 4, after)
    assert [rows.token_ids for rows in level] == [[12], []]
    assert draft is not None and (draft.token_ids, draft.parents) == ([12], [-1])
    assert none is None
