"""Draft trees that the device has grown and whose shape, too, the host does not know yet."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.batch.step_inputs import StepInputs
from engine.download import Downloader
from engine.step.late_tokens import LateTokens, taken


class LateTrees(LateTokens):
    """Trees that are drafted at once. To the host each is a star of as many nodes as it has room for: all
    follow the sequence's last token. Nodes that the tree turns out not to have come last. They stay children
    of the root, and are never accepted.
    """

    def __init__(self, nodes: Tensor, download: Downloader) -> None:
        """int64 [4, n]: tokens; the rows of their trees that they follow, -1 for what is no node; masks as in
        `AttentionMetadata.visible`; and how much deeper than children of the root they are.
        """
        super().__init__(nodes[:2].flatten(), download)
        _, self._rows_before, self._masks, self._deeper = nodes

    def fill(self, inputs: StepInputs) -> None:
        names, visible = inputs.token_ids, inputs.attention.visible
        assert visible is not None
        visible.copy_(taken(self._masks, names, visible))
        inputs.positions.add_(self.further(names))
        super().fill(inputs)

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
