"""The trees of `speculation.tree`, node for node, grown by the device: the host knows how many rows a round
has, and need not wait to learn which. A round is a launch, and another lays its rows out.

    growth = TreeGrowth(max_nodes, width=4, block_size=16, upload=upload_to(device))
    scores, token_ids = ...  # of what follows each sequence's last token, a row each
    for _ in range(rounds):
        level = growth.grow(scores, token_ids)
        scores, token_ids = ...  # of what follows each tree's rows, as many of each
    nodes = growth.end(scores, token_ids)

Each tree has as many rows in a round; what is worth running comes first, and behind it is padding. And it has
places for as many nodes as the largest, of which its own come first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from engine.batch.step_inputs import StepInputs
from engine.triton_support import ceil_div
from engine.upload import Upload

_LEAVES = 64
"""That a tree has places for: more than it may have nodes."""
_TILE = 512


class State(NamedTuple):
    """Of trees that grow. Before the first round nothing is there."""

    nodes: Tensor
    """int64 [4, trees, most nodes], as `engine.step.late_trees.LateTrees` takes them."""
    leaves: Tensor
    """int64 [4, trees, leaves]: tokens, the rows that they follow, the masks of these, and how much deeper
    than children of the root they are."""
    leaf_scores: Tensor
    """float64 [trees, leaves]: log-probabilities of the paths to them, -inf where there is none."""
    paths: Tensor
    """float64 [trees, width]: those of the rows that were run last."""
    sources: Tensor
    """int64 [trees, width]: which of the rows that were run before they follow."""
    runs: Tensor
    """int64 [trees, 2]: how many rows were run behind the root, and how many of these last."""

    @classmethod
    def of(cls, trees: int, most: int, width: int, device: torch.device) -> State:
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


@dataclass(slots=True, eq=False)
class Level:
    """Rows of trees that grow, those of one tree after another's, and then padding: `num_rows` of each tree.
    They are `depth` tokens behind their roots, and those that they follow were `num_before` of each. It holds
    until the next round.
    """

    state: State
    num_rows: int
    num_before: int
    depth: int
    block_size: int

    def before(self, hidden: Tensor) -> Tensor:
        """Of `hidden` [trees * rows before, size] what the rows that these follow have, [rows, size]."""
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
        """The step's rows are these. Their KV goes behind that of their trees' rows before."""
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
    def __init__(self, max_nodes: Sequence[int], width: int, block_size: int, upload: Upload) -> None:
        """`upload` is to the device, and is used by nobody else meanwhile."""
        (self._rooms,) = upload([np.array(max_nodes, np.int64)])
        self._state = State.of(len(max_nodes), max(max_nodes), width, self._rooms.device)
        self._block_size = block_size
        self._width, self._most = width, max(max_nodes)
        self._num_rows, self._depth = 1, 0

    def grow(self, scores: Tensor, token_ids: Tensor) -> Level:
        """The rows to run next. `scores` and `token_ids` are as `DraftTrees.grow` takes them."""
        from speculation.tree_kernels import grow

        before = self._num_rows
        num_children = self._launch(grow, scores, token_ids)
        self._num_rows = min(self._width, self._most, before * num_children)
        self._depth += 1
        return Level(self._state, self._num_rows, before, self._depth, self._block_size)

    def end(self, scores: Tensor, token_ids: Tensor) -> Tensor:
        """int64 [4, trees * most nodes], as `engine.step.late_trees.LateTrees` takes them."""
        from speculation.tree_kernels import end

        self._launch(end, scores, token_ids)
        return self._state.nodes.flatten(1)

    def _launch(self, kernel: Any, scores: Tensor, token_ids: Tensor) -> int:
        """Returns how many children a row gets."""
        best = scores.topk(min(self._width, scores.shape[1]))
        num_children = best.indices.shape[1]
        kernel[(len(self._rooms),)](
            self._rooms,
            *self._state,
            *best,
            token_ids,
            token_ids.stride(0),
            self._num_rows,
            self._depth,
            self._most,
            WIDTH=self._width,
            CHILDREN=num_children,
            LEAVES=_LEAVES,
            PADDED=_padded(_LEAVES + self._width**2),
            num_warps=8,
        )
        return num_children


def _padded(count: int) -> int:
    """The next power of two."""
    return 1 << (count - 1).bit_length()
