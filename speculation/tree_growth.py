"""The trees of `speculation.tree`, node for node, grown by the device: the host knows how many rows a round
has, and need not wait to learn which.

    growth = TreeGrowth(max_nodes, width=4, upload=upload_to(device))
    scores, token_ids = ...  # of what follows each sequence's last token, a row each
    for _ in range(rounds):
        level, sources = growth.grow(scores, token_ids)
        scores, token_ids = ...  # of what follows each tree's rows, as many of each
    nodes = growth.end(scores, token_ids)

Each tree has as many rows in a round; what is worth running comes first, and behind it is padding. And it has
places for as many nodes as the largest, of which its own come first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from engine.late_trees import LateLevel
from engine.upload import Upload
from speculation.tree import NEAR


class _Leaves(NamedTuple):
    """The likeliest first: `scores` float64 [trees, n], -inf where there is none. `facts` int64
    [5, trees, n]: tokens, the rows that they follow, the masks of these, how much deeper than children of the
    root they are, and which of the tree's newest rows they follow, or -1.
    """

    scores: Tensor
    facts: Tensor

    @property
    def are_new(self) -> Tensor:
        """Bool [trees, n]: children of the newest rows."""
        return self.scores.isfinite() & (self.facts[4] >= 0)

    def without(self, chosen: Tensor) -> _Leaves:
        """Those that are left, none of which is new any more."""
        facts = torch.cat([self.facts[:4], torch.full_like(self.facts[4:], -1)])
        return _Leaves(self.scores.masked_fill(chosen, -torch.inf), facts)


class _Newest(NamedTuple):
    """Rows that were run last, [trees, rows]: log-probabilities of the paths to them, float64, -inf for
    padding; int64 numbers and masks.
    """

    scores: Tensor
    numbers: Tensor
    masks: Tensor


class TreeGrowth:
    def __init__(self, max_nodes: Sequence[int], width: int, block_size: int, upload: Upload) -> None:
        """`upload` is to the device, and is used by nobody else meanwhile."""
        self._block_size = block_size
        (self._rooms,) = upload([np.array(max_nodes, np.int64)[:, None]])
        self._width, self._most, self._depth = width, max(max_nodes), 0
        self._num_run = root = torch.zeros_like(self._rooms)
        self._places = torch.arange(self._most + 1, device=root.device)
        self._trees = torch.arange(len(max_nodes), device=root.device).unsqueeze(1)
        self._nodes = root.new_zeros((4, len(max_nodes), self._most + 1))
        """As `LateTrees` takes them, and in the last column what has no place."""
        self._nodes[1] = -1
        self._nodes[2] = 1 | 2 << self._places
        self._newest = _Newest(root.double(), root, root + 1)
        self._leaves = _Leaves(root[:, :0].double(), self._nodes.new_zeros((5, len(max_nodes), 0)))

    def grow(self, scores: Tensor, token_ids: Tensor) -> tuple[LateLevel, Tensor]:
        """The rows to run next, and int64 [n], where those that they follow lie among the rows before.
        `scores` and `token_ids` are as `DraftTrees.grow` takes them.
        """
        leaves = self._with_children(scores, token_ids)
        chosen = self._worth_running(leaves)
        numbers, masks = self._place(leaves, chosen)
        trees = self._trees.expand_as(numbers)
        sources = (trees * self._newest.numbers.shape[1] + leaves.facts[4]).clamp_min(0)
        facts = torch.stack([leaves.facts[0], masks, numbers, trees, sources])
        first = chosen.long().argsort(dim=1, descending=True, stable=True)[:, : self._width]
        facts, is_run = facts.gather(2, first.expand(5, -1, -1)), chosen.gather(1, first)
        paths = leaves.scores.gather(1, first).masked_fill(~is_run, -torch.inf)
        self._newest, self._leaves = _Newest(paths, facts[2], facts[1]), leaves.without(chosen)
        return self._packed(facts, is_run)

    def _packed(self, facts: Tensor, is_run: Tensor) -> tuple[LateLevel, Tensor]:
        """What is run, bool [trees, rows], without the padding between trees. `facts` [5, trees, rows] are
        those of `LateLevel.rows` and where the rows lie that they follow.
        """
        order = is_run.flatten().long().argsort(descending=True, stable=True)
        numbers = torch.where(is_run, facts[2], -1)
        rows = torch.cat([facts[:2], numbers.unsqueeze(0), facts[3:]]).flatten(1)[:, order]
        level = LateLevel(
            rows[:4],
            ends=is_run.sum(1).cumsum(0),
            sizes=1 + self._num_run.squeeze(1),
            logit_rows=(is_run.flatten().cumsum(0) - 1).clamp_min(0),
            depth=self._depth,
            block_size=self._block_size,
        )
        return level, rows[4]

    def end(self, scores: Tensor, token_ids: Tensor) -> Tensor:
        """int64 [4, trees * most nodes], as `engine.late_trees.LateTrees` takes them."""
        leaves = self._with_children(scores, token_ids)
        self._place(leaves, leaves.scores.isfinite())
        return self._nodes[..., : self._most].flatten(1)

    def _with_children(self, scores: Tensor, token_ids: Tensor) -> _Leaves:
        """Those that there is room for, when the newest rows have children."""
        best = scores.topk(min(self._width, scores.shape[1]))
        newest, of_rows = self._newest, (*self._newest.numbers.shape, best.indices.shape[1])
        paths = newest.scores.unsqueeze(2) + best.values.double().view(of_rows)
        facts = [
            token_ids.gather(1, best.indices).view(of_rows),
            newest.numbers.unsqueeze(2),
            newest.masks.unsqueeze(2),
            torch.full_like(newest.numbers, self._depth).unsqueeze(2),
            torch.arange(of_rows[1], device=scores.device).unsqueeze(1),
        ]
        self._depth += 1
        children = torch.stack([each.expand(of_rows) for each in facts]).flatten(2)
        paths = paths.masked_fill(~paths.isfinite(), -torch.inf).flatten(1)
        every = torch.cat([self._leaves.scores, paths], 1).sort(dim=1, descending=True, stable=True)
        kept = every.indices[:, : self._most]
        is_out = self._places[: kept.shape[1]] >= self._rooms - self._num_run
        return _Leaves(
            every.values[:, : self._most].masked_fill(is_out, -torch.inf),
            torch.cat([self._leaves.facts, children], 2).gather(2, kept.expand(5, -1, -1)),
        )

    def _worth_running(self, leaves: _Leaves) -> Tensor:
        """Bool [trees, n]."""
        is_new = leaves.are_new
        likeliest = leaves.scores.masked_fill(~is_new, -torch.inf).amax(1, keepdim=True)
        return is_new & (is_new.cumsum(1) <= self._width) & (leaves.scores >= likeliest + NEAR)

    def _place(self, leaves: _Leaves, chosen: Tensor) -> tuple[Tensor, Tensor]:
        """Make nodes of those that are chosen; returns numbers and masks of their rows, [trees, n]."""
        numbers = self._num_run + chosen.cumsum(1)
        tokens, rows_before, masks, deeper, _ = leaves.facts
        masks = masks | 1 << numbers
        places = torch.where(chosen, numbers - 1, self._most)
        nodes = torch.stack([tokens, rows_before, masks, deeper])
        self._nodes.scatter_(2, places.expand(4, -1, -1), nodes)
        self._num_run = self._num_run + chosen.sum(1, keepdim=True)
        return numbers, masks
