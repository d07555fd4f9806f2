"""The static tree is optimal for its size."""

from __future__ import annotations

import itertools
import math
import random

import pytest

from engine.step.draft import Draft
from speculation.medusa import StaticTree, assumed_acceptance, choose_tree

TABLE = [[0.6, 0.15, 0.1, 0.02], [0.4, 0.2, 0.05], [0.3, 0.1]]


def probabilities(tree: StaticTree, table: list[list[float]]) -> list[float]:
    """Return for each node the probability that it and all its ancestors are right."""
    found: list[float] = []
    for parent, depth, rank in zip(tree.parents, tree.depths, tree.ranks, strict=True):
        found.append((found[parent] if parent >= 0 else 1.0) * table[depth][rank])
    return found


def all_paths(table: list[list[float]]) -> list[float]:
    ways = []
    for depth in range(1, len(table) + 1):
        for ranks in itertools.product(*(range(len(row)) for row in table[:depth])):
            ways.append(math.prod(table[head][rank] for head, rank in enumerate(ranks)))
    return sorted(ways, reverse=True)


def test_random_tables_give_optimal_trees() -> None:
    rng = random.Random(3)
    for _ in range(20):
        table = [
            sorted((rng.random() / 5 for _ in range(rng.randint(1, 5))), reverse=True)
            for _ in range(rng.randint(1, 4))
        ]
        size = rng.randint(1, 40)
        assert probabilities(choose_tree(table, size), table) == pytest.approx(all_paths(table)[:size])


def test_parents_come_first_and_siblings_differ() -> None:
    tree = choose_tree(TABLE, 30)
    places = list(zip(tree.parents, tree.ranks, strict=True))
    assert len(set(places)) == 30
    for node, (parent, depth) in enumerate(zip(tree.parents, tree.depths, strict=True)):
        assert parent < node
        assert depth == (0 if parent < 0 else tree.depths[parent] + 1)
    tokens = [100 * depth + rank for depth, rank in zip(tree.depths, tree.ranks, strict=True)]
    masks = Draft(tokens, tree.parents).masks()
    assert masks is not None and all(mask >> (row) & 1 for row, mask in enumerate(masks))


def test_ranks_that_were_never_right_come_last() -> None:
    tree = choose_tree([[0.5, 0.0, 0.3], [0.0]], 10)
    assert tree.ranks[0] == 0
    assert len(tree.ranks) == 6
    assert choose_tree([[0.0], [0.0]], 10).parents == [-1, 0]


def test_the_assumed_table_gives_a_tree_like_the_published_one() -> None:
    """mc_sim_7b_63 of Medusa's authors begins with [0], [0, 0], [1], [0, 1], [2], [0, 0, 0], [1, 0]."""
    tree = choose_tree(assumed_acceptance(4), 63)
    paths: list[list[int]] = []
    for parent, rank in zip(tree.parents, tree.ranks, strict=True):
        paths.append([*(paths[parent] if parent >= 0 else []), rank])
    assert len(paths) == 63
    for path in ([0], [0, 0], [1], [0, 1], [2], [0, 0, 0], [1, 0]):
        assert path in paths[:9]
    assert [0, 0, 0, 0] in paths
