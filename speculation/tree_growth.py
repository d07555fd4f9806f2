"""Dynamic draft trees (EAGLE-2: Li et al. 2024, sections 4.1 and 4.2), for any model that drafts.

The trees of a batch grow together, level by level. At each level the model runs the trees' newest rows and
gives the likelihood of each token after them. The likeliest of the new nodes, by the probability of their
whole path, are run next. The draft is all nodes that were run, and the likeliest of the rest. Unlike in
EAGLE-2, a tree runs only nodes that it will have room for and that come near the likeliest: nodes that were
run stay, so their KV need not be moved.

    growth = TreeGrowth(max_nodes, width=4, block_size=16, upload=upload_to(device))
    scores, token_ids = ...  # of what may follow each sequence's last token, a row each
    for _ in range(depth - 1):
        level = growth.grow(scores, token_ids)
        scores, token_ids = ...  # of what may follow the level's rows
    nodes = growth.end(scores, token_ids)

Row 0 of a tree is the sequence's last token, and row i + 1 is node i of the draft. So row i's KV, written i
places after the last token's, is where the target puts its own, and `SequenceBlocks.commit` keeps both.

On a CPU a level takes some of torch's operators, and the rows to run are read from it. On a GPU it is one
kernel, and the host need not know the rows: each tree has the same number, some of them padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from engine.batch.step_inputs import StepInputs
from engine.copies import Upload
from engine.triton_support import ceil_div
from speculation.chains import DraftRows
from speculation.drawing import NEAR

TREE_WIDTH = 4
"""Rows of a tree in a forward, and children of a row, at most."""

_LEAVES = 64
"""Room for a tree's leaves: more than a tree can have nodes."""
_TILE = 512


class GrowthState(NamedTuple):
    """The state of growing trees. The kernels do not read it before the first level."""

    nodes: Tensor
    """int64 [4, trees, most nodes], as `engine.step.draft.LateTrees` takes them."""
    leaves: Tensor
    """int64 [4, trees, leaves]: tokens, the rows that they follow, these rows' masks, and the depth after the
    root's children.
    """
    leaf_scores: Tensor
    """float64 [trees, leaves]: log-probabilities of the paths to the leaves, -inf without a leaf."""
    paths: Tensor
    """float64 [trees, width]: log-probabilities of the paths to the newest rows."""
    sources: Tensor
    """int64 [trees, width]: the rows of the previous level that the newest rows follow."""
    runs: Tensor
    """int64 [trees, 2]: the number of nodes that were run, and of rows in the newest level."""

    @classmethod
    def of(cls, trees: int, most: int, width: int, device: torch.device) -> GrowthState:
        def empty(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        return cls(
            empty(4, trees, most),
            empty(4, trees, _LEAVES),
            empty(trees, _LEAVES, dtype=torch.float64),
            empty(trees, width, dtype=torch.float64),
            empty(trees, width),
            empty(trees, 2),
        )

    def begin(self) -> None:
        self.leaves.zero_()
        self.leaf_scores.fill_(-torch.inf)
        self.paths.zero_()
        self.runs.copy_(torch.tensor([0, 1]))


@dataclass(slots=True, eq=False)
class TreeLevel:
    """The rows to run next, `depth` tokens after their roots. On a GPU there are `num_rows` per tree
    (`num_before` at the previous level): the trees' own rows, one tree after the other, then padding. A level
    is valid until the next one.
    """

    state: GrowthState
    num_rows: int
    num_before: int
    depth: int
    block_size: int
    followed: Tensor | None = None
    """On a CPU, int64 [rows]: the rows of the previous level that these follow, numbered over all trees."""

    def rows(self) -> list[DraftRows]:
        """Read the rows from trees on a CPU."""
        found = []
        for tree, (end, count) in enumerate(self.state.runs.tolist()):
            token_ids, _, masks, _ = self.state.nodes[:, tree, end - count : end].tolist()
            found.append(DraftRows(1 + end - count, token_ids, [mask % (1 << 64) for mask in masks]))
        return found

    def unknown_rows(self, max_nodes: Sequence[int]) -> list[DraftRows]:
        """Return rows for `fill` to complete, which begin anywhere: the host knows only `max_nodes`."""
        count, width = self.num_rows, self.state.sources.shape[1]
        ends = [min(self.depth * width, most) for most in max_nodes]
        return [DraftRows(1 + end - count, [0] * count, [1] * count) for end in ends]

    def before(self, hidden: Tensor) -> Tensor:
        """Return the rows of `hidden` [trees * rows before, size] that this level's rows follow, on a GPU."""
        from speculation.tree_kernels import follow

        trees, width = self.state.sources.shape
        out = hidden.new_empty((trees * self.num_rows, hidden.shape[1]))
        follow[(trees, ceil_div(hidden.shape[1], _TILE))](
            hidden,
            out,
            self.state.sources,
            self.state.runs,
            self.num_rows,
            self.num_before,
            hidden.stride(0),
            hidden.shape[1],
            WIDTH=width,
            PADDED=_padded(width),
            TILE=_TILE,
        )
        return out

    def fill(self, inputs: StepInputs) -> None:
        """Write this level's rows to a step's inputs on a GPU, with slots after their trees' earlier rows."""
        from speculation.tree_kernels import lay_out

        attention, nodes = inputs.attention, self.state.nodes
        blocks, slots = attention.block_table, attention.slot_mapping
        assert attention.visible is not None and attention.tree_start is not None
        lay_out[(nodes.shape[1],)](
            nodes,
            self.state.runs,
            attention.tree_start,
            blocks,
            inputs.token_ids,
            inputs.positions,
            inputs.logit_rows,
            attention.visible,
            attention.query_start,
            attention.context_len,
            slots,
            self.num_rows,
            self.depth,
            nodes.shape[2],
            slots.numel() // slots.shape[-1],
            blocks.stride(0),
            blocks.stride(-2),
            slots.stride(0),
            BLOCK_SIZE=self.block_size,
            PADDED=_padded(self.state.sources.shape[1]),
            num_warps=1,
        )


class TreeGrowth:
    """A tree for each sequence of a batch, of at most `max_nodes[i]` nodes; the masks have bits for 63."""

    def __init__(
        self, max_nodes: Sequence[int], width: int, block_size: int, upload: Upload, *, by_kernels: bool
    ) -> None:
        """Run up to `width` rows of a tree at each level, and give each row up to `width` children. `upload`
        copies to where the trees grow, and nothing else uses it meanwhile.
        """
        (self._rooms,) = upload([np.array(max_nodes, np.int64)])
        self._state = GrowthState.of(len(max_nodes), max(max_nodes), width, self._rooms.device)
        self._block_size, self._by_kernels = block_size, by_kernels
        self._width, self._most = width, max(max_nodes)
        self._num_rows, self._depth = 1, 0
        if not by_kernels:
            self._state.begin()

    def grow(self, scores: Tensor, token_ids: Tensor) -> TreeLevel:
        """Return the rows to run next; a complete tree has none.

        `scores`, float32 [rows, n], are the log-probabilities of the tokens `token_ids` [rows, n] after the
        rows that were run last, the best first; a row's tokens differ.
        """
        followed = None
        num_before, children = self._num_rows, scores.shape[1]
        if self._by_kernels:
            from speculation.tree_kernels import grow

            self._launch(grow, scores, token_ids)
        else:
            followed = self._grow(scores, token_ids)
        self._num_rows = min(self._width, self._most, num_before * children)
        self._depth += 1
        return TreeLevel(self._state, self._num_rows, num_before, self._depth, self._block_size, followed)

    def end(self, scores: Tensor, token_ids: Tensor) -> Tensor:
        """Return the nodes, int64 [4, trees, most nodes], in the form of `engine.step.draft.LateTrees`."""
        if self._by_kernels:
            from speculation.tree_kernels import end

            self._launch(end, scores, token_ids)
        else:
            self._end(scores, token_ids)
        return self._state.nodes

    def _launch(self, kernel: Any, scores: Tensor, token_ids: Tensor) -> None:
        kernel[(len(self._rooms),)](
            self._rooms,
            *self._state,
            scores,
            token_ids,
            self._num_rows,
            self._depth,
            self._most,
            WIDTH=self._width,
            CHILDREN=scores.shape[1],
            LEAVES=_LEAVES,
            PADDED=_padded(_LEAVES + self._width**2),
            num_warps=8,
        )

    def _grow(self, scores: Tensor, token_ids: Tensor) -> Tensor:
        """Grow a level with torch's operators; return `TreeLevel.followed`."""
        state, (num_run, num_before) = self._state, self._state.runs.T.clone()
        scores, order, facts = self._candidates(scores, token_ids)
        is_new = (order >= _LEAVES) & (scores > -torch.inf)
        places = is_new.cumsum(1) - 1
        likeliest = scores.masked_fill(~is_new, -torch.inf).amax(1, keepdim=True)
        chosen = is_new & (places < self._width) & (scores >= likeliest + NEAR)
        tree, at = self._place(facts, num_run.unsqueeze(1) + places, chosen)
        to, source = places[tree, at], (order[tree, at] - _LEAVES) // token_ids.shape[1]
        state.paths[tree, to] = scores[tree, at]
        state.sources[tree, to] = source
        count = chosen.sum(1)
        state.runs.copy_(torch.stack([num_run + count, count], 1))
        state.leaf_scores.copy_(scores.masked_fill(chosen, -torch.inf)[:, :_LEAVES])
        state.leaves.copy_(facts[:, :, :_LEAVES])
        return (num_before.cumsum(0) - num_before)[tree] + source

    def _end(self, scores: Tensor, token_ids: Tensor) -> None:
        """Make nodes of all candidates that there is room for, and mark the rest of the places as empty."""
        scores, _, facts = self._candidates(scores, token_ids)
        num_run, chosen = self._state.runs[:, :1], scores > -torch.inf
        places = torch.arange(scores.shape[1])
        self._place(facts, num_run + places, chosen)
        is_left = (places >= num_run + chosen.sum(1, keepdim=True)) & (places < self._most)
        nothing = torch.tensor([0, -1, 1, 0]).view(4, 1, 1).expand_as(facts)
        self._place(nothing, places.expand_as(scores), is_left)

    def _candidates(self, scores: Tensor, token_ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the leaves and the newest rows' children, the likeliest first: scores [trees, n], -inf if
        there is no room; numbers, the children's from `_LEAVES` on; and facts [4, trees, n] like
        `GrowthState.leaves`.
        """
        state, children = self._state, scores.shape[1]
        num_run, count = state.runs.unsqueeze(2).unbind(1)
        row = torch.arange(self._width)
        is_run = row < count

        def of_rows(values: Tensor) -> Tensor:
            """Spread [rows, n], one tree after the other, to [trees, width * n]."""
            spread = values.new_zeros((*is_run.shape, children))
            spread[is_run] = values
            return spread.flatten(1)

        newest = num_run - count + row
        masks = torch.ones_like(newest)
        if self._depth:
            masks = state.nodes[2].gather(1, newest.clamp(0, self._most - 1))
        follows = torch.stack([newest + 1, masks, torch.full_like(newest, self._depth)])
        facts = torch.cat([of_rows(token_ids).unsqueeze(0), follows.repeat_interleave(children, 2)])
        paths = state.paths.repeat_interleave(children, 1) + of_rows(scores.double())
        is_offered = is_run.repeat_interleave(children, 1) & paths.isfinite()
        every = torch.cat([state.leaf_scores, paths.masked_fill(~is_offered, -torch.inf)], 1)
        ordered, order = every.sort(dim=1, descending=True, stable=True)
        has_room = torch.arange(every.shape[1]) < self._rooms.unsqueeze(1) - num_run
        facts = torch.cat([state.leaves, facts], 2).gather(2, order.expand(4, -1, -1))
        return ordered.masked_fill(~has_room, -torch.inf), order, facts

    def _place(self, facts: Tensor, places: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
        """Make nodes of the chosen candidates; return their trees and their numbers."""
        tree, at = chosen.nonzero(as_tuple=True)
        place, nodes = places[tree, at], facts[:, tree, at].clone()
        nodes[2] |= torch.bitwise_left_shift(2, place)
        self._state.nodes[:, tree, place] = nodes
        return tree, at


def _padded(count: int) -> int:
    """Return the next power of two."""
    return 1 << (count - 1).bit_length()
