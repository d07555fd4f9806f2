"""Grows trees on the host over a test's own model."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from engine.copies import upload_to
from engine.step.draft import Draft
from speculation.chains import DraftRows
from speculation.drawing import best_of
from speculation.tree_drafting import drafts_of
from speculation.tree_growth import TreeGrowth

CPU = torch.device("cpu")
Path = tuple[int, ...]
After = Callable[[int, Path], tuple[Tensor, Tensor]]
"""Returns scores [n] and tokens [n] of the candidates that follow a path in a tree."""


def grow_trees(
    max_nodes: Sequence[int], depth: int, width: int, after: After
) -> tuple[list[Draft | None], list[list[DraftRows]]]:
    """Grow trees. Return the drafts and the rows of all levels, after checking that they agree."""
    growth = TreeGrowth(max_nodes, width, 16, upload_to(CPU), by_kernels=False)
    paths: list[list[Path]] = [[()] for _ in max_nodes]
    newest: list[tuple[int, Path]] = [(tree, ()) for tree in range(len(max_nodes))]
    levels: list[list[DraftRows]] = []
    while newest and len(levels) < depth - 1:
        level = growth.grow(*best_after(newest, width, after))
        levels.append(level.rows())
        assert level.followed is not None
        followed, newest = [newest[row] for row in level.followed.tolist()], []
        for tree, rows in enumerate(levels[-1]):
            assert rows.first == len(paths[tree])
            extend(paths[tree], rows)
            newest += [(tree, path) for path in paths[tree][rows.first :]]
        assert followed == [(tree, path[:-1]) for tree, path in newest]
    return drafts_of(growth.end(*best_after(newest, width, after))), levels


def best_after(newest: Sequence[tuple[int, Path]], width: int, after: After) -> tuple[Tensor, Tensor]:
    if not newest:
        return torch.empty(0, width), torch.empty(0, width, dtype=torch.int64)
    scores, token_ids = zip(*(after(tree, path) for tree, path in newest), strict=True)
    return best_of(torch.stack(scores), torch.stack(token_ids), width)


def extend(paths: list[Path], rows: DraftRows) -> None:
    """Extend the paths of a tree's rows by these rows, as their masks say."""
    for token_id, mask in zip(rows.token_ids, rows.masks or [], strict=True):
        assert mask >> len(paths) == 1
        parent = (mask - (1 << len(paths))).bit_length() - 1
        paths.append((*paths[parent], token_id))
