"""Dynamic draft trees (EAGLE-2: Li et al. 2024, sections 4.1 and 4.2), whatever model drafts them.

Trees grow by rounds, those of a batch together. In each the model runs the trees' new rows, and says how
likely each token is after them; the likeliest of the new nodes, by the probability of their whole path, are
run in the next round. The draft is all nodes that were run, and the likeliest of the rest. Unlike EAGLE-2's,
a tree runs only nodes that it will have room for and that come near the likeliest: what is run stays, so that
its KV needn't be moved.

    trees = DraftTrees(max_nodes, depth=8, width=4, download=Downloader(device))
    scores, token_ids = ...  # of what follows each sequence's last token, a row each
    while any(rows.token_ids for rows in (grown := trees.grow(scores, token_ids))):
        scores, token_ids = ...  # of what follows each of the rows in `grown`
    drafts = trees.drafts()

Row 0 of a tree is the sequence's last token, and row i + 1 is node i of the draft. So if row i's KV is
written i places behind the last token's, it lies where the target puts its own, and `SequenceBlocks.commit`
keeps both.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from engine.step.draft import Draft

TREE_WIDTH = 4
"""Rows of a tree in a forward, and children of a row."""

NEAR = math.log(0.3)
"""Paths this much less likely than their round's likeliest are not followed: of 0.02 to 0.6 times as likely,
this brought the most accepted tokens (bundled pair, 8 to 24 nodes)."""


@dataclass(slots=True)
class TreeRows:
    """Rows of one tree to run next, in order; the first of them is its row `first`.

    `parents` are the rows that they follow, and `sources` where these lie among the rows that were run last,
    of all trees one after the other. `masks` have a bit for each row on the path to them, their own
    included (bit i: row i), as `engine.batch.runner.SequenceRows` takes them.
    """

    first: int
    token_ids: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    sources: list[int] = field(default_factory=list)
    masks: list[int] = field(default_factory=list)

    @property
    def depths(self) -> list[int]:
        """How many tokens behind the sequence's last one they are."""
        return [mask.bit_count() - 1 for mask in self.masks]


class DraftTrees:
    """A tree for each sequence of a batch, of at most `max_nodes[i]` nodes (63 fit the masks) and `depth`.

    In a round up to `width` of a tree's rows are run, and each row gets up to `width` children. `download`
    brings values from the model's device, which is all that the host waits for in a round.
    """

    def __init__(
        self, max_nodes: Sequence[int], depth: int, width: int, download: Callable[[Tensor], Tensor]
    ) -> None:
        self._trees = [_Tree(limit, depth, width) for limit in max_nodes]
        self._width = width
        self._download = download

    def grow(self, scores: Tensor, token_ids: Tensor) -> list[TreeRows]:
        """The rows to run next, for each sequence; none where its tree is complete.

        `scores` [rows, n] are log-probabilities of the tokens `token_ids` [rows, n] after the rows that were
        run last, of all trees one after the other. A row's tokens differ.
        """
        best = scores.topk(min(self._width, scores.shape[1]))
        tokens = token_ids.gather(1, best.indices)
        both = self._download(torch.stack([best.values.double(), tokens.double()]))  # which has them exactly
        children = zip(both[0].tolist(), both[1].long().tolist(), strict=True)
        for tree in self._trees:
            for row in tree.newest:
                tree.add_children(row, *next(children))
        offsets = [*accumulate((len(tree.newest) for tree in self._trees), initial=0)]
        return [tree.advance(offset) for tree, offset in zip(self._trees, offsets, strict=False)]

    def drafts(self) -> list[Draft | None]:
        """Each sequence's draft; None where no token has a finite score."""
        return [tree.draft() for tree in self._trees]


class _Node(NamedTuple):
    token_id: int
    parent: int
    """Row that it follows."""
    score: float
    """Log-probability of the path to it."""


class _Tree:
    def __init__(self, max_nodes: int, depth: int, width: int) -> None:
        self.newest = range(1)
        """The rows that were run last."""
        self._max_nodes = max_nodes
        self._width = width
        self._rounds_left = depth
        self._run: list[_Node] = []
        self._leaves: list[_Node] = []
        self._masks = [1]

    def add_children(self, row: int, scores: list[float], token_ids: list[int]) -> None:
        path_score = self._run[row - 1].score if row else 0.0
        for score, token_id in zip(scores, token_ids, strict=True):
            if math.isfinite(score):
                self._leaves.append(_Node(token_id, row, path_score + score))

    def advance(self, offset: int) -> TreeRows:
        """Keep the leaves that there is room for, and run the best of the new ones. `offset`: rows of other
        trees that lie before this one's newest.
        """
        self._rounds_left -= 1
        room = self._max_nodes - len(self._run)
        self._leaves = heapq.nlargest(room, self._leaves, key=lambda leaf: leaf.score)
        chosen = self._worth_running() if self._rounds_left > 0 else []
        self._leaves = [leaf for leaf in self._leaves if leaf not in chosen]
        rows = TreeRows(first=len(self._masks))
        for leaf in chosen:
            mask = self._masks[leaf.parent] | 1 << len(self._masks)
            self._masks.append(mask)
            self._run.append(leaf)
            rows.token_ids.append(leaf.token_id)
            rows.parents.append(leaf.parent)
            rows.sources.append(offset + leaf.parent - self.newest.start)
            rows.masks.append(mask)
        self.newest = range(rows.first, len(self._masks))
        return rows

    def _worth_running(self) -> list[_Node]:
        new = [leaf for leaf in self._leaves if leaf.parent in self.newest]
        return [leaf for leaf in new[: self._width] if leaf.score >= new[0].score + NEAR]

    def draft(self) -> Draft | None:
        nodes = self._run + self._leaves
        if not nodes:
            return None
        return Draft([node.token_id for node in nodes], [node.parent - 1 for node in nodes])
