"""Draft trees that the device has grown and whose shape, too, the host does not know yet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.download import Downloader
from engine.late_tokens import LateTokens, taken
from engine.step_inputs import StepInputs


class LateTrees(LateTokens):
    """Of trees that are drafted at once. To the host each is a star, with the nodes that it has room for: all
    of them follow the sequence's last token. Those that the tree does not have are the last ones. They stay
    children of the root, which nothing accepts.
    """

    def __init__(self, nodes: Tensor, download: Downloader) -> None:
        """int64 [4, n]: tokens; the rows of their trees that they follow, -1 for what is no node; masks as in
        `AttentionMetadata.visible`; and how much deeper than children of the root they are.
        """
        super().__init__(nodes[:2].flatten(), download)
        _, self._rows_before, self._masks, self._deeper = nodes

    def fill_rows(self, inputs: StepInputs) -> None:
        names, visible = inputs.token_ids, inputs.attention.visible
        assert visible is not None
        visible.copy_(taken(self._masks, names, visible))
        inputs.positions.add_(self.further(names))
        super().fill_rows(inputs)

    def fill_nodes(self, nodes: Tensor) -> None:
        names, parents = nodes.unbind(1)
        parents.copy_(taken(self._rows_before - 1, names, parents))
        super().fill_nodes(nodes)

    def further(self, names: Tensor) -> Tensor:
        """int64 [n]: how much further than in a star those are that have such `names`; 0 for others."""
        return taken(self._deeper, names, torch.zeros_like(names))

    def parents(self, names: Sequence[int]) -> list[int] | None:
        rows_before = self.values[len(self.values) // 2 :]
        return [rows_before[~name] - 1 for name in names]


@dataclass(slots=True, eq=False)
class LateLevel:
    """Rows of trees that grow, those of one tree after another's, and then padding.

    `rows` int64 [4, n]: tokens, masks, the rows' numbers in their trees, -1 for padding, and whose they are.
    `ends` int64 [trees]: where each tree's end here; it has `sizes` int64 [trees] rows in all by then. They
    are `depth` tokens behind their roots. Logits are wanted of `logit_rows` int64 [n].
    """

    rows: Tensor
    ends: Tensor
    sizes: Tensor
    logit_rows: Tensor
    depth: int
    block_size: int

    def fill_rows(self, inputs: StepInputs) -> None:
        """The step's rows are these. Their KV goes behind that of their trees' rows before."""
        (tokens, masks, numbers, trees), attention = self.rows, inputs.attention
        count, num_trees = len(tokens), len(self.ends)
        assert attention.visible is not None and attention.tree_start is not None
        starts = attention.tree_start.long()
        inputs.token_ids[:count] = tokens
        inputs.positions[:count] = starts[trees] + self.depth
        inputs.logit_rows[:count] = self.logit_rows
        attention.visible[:count] = masks
        attention.query_start[1 : 1 + num_trees] = self.ends
        attention.context_len[:num_trees] = starts[:num_trees] + self.sizes
        places = starts[trees] + numbers.clamp_min(0)
        blocks = attention.block_table[..., trees, places // self.block_size].long()
        slots = blocks * self.block_size + places % self.block_size
        attention.slot_mapping[..., :count] = torch.where(numbers < 0, -1, slots)
