"""Tokens that the device has chosen and the host does not know yet: of the step before, or drafted.

The shape of draft trees may be late, too. What runs and verifies them reads them on the device. The host gets
them with what it waits for anyway.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.batch.step_inputs import StepInputs
from engine.copies import Downloader


class LateTokens:
    """`on_device`, int64 [n]. In a step's rows and in drafts `~i` stands for token i of these."""

    def __init__(self, on_device: Tensor, download: Downloader) -> None:
        """A row whose token could not be chosen, negative, gets token 0."""
        self._on_device = on_device
        self._download = download
        self._values: list[int] | None = None

    def fill(self, inputs: StepInputs) -> None:
        """Put the tokens into the rows that stand for them."""
        self.fill_ids(inputs.token_ids)

    def fill_ids(self, ids: Tensor) -> None:
        """Replace the negative `ids` [n], on the device."""
        torch.clamp(taken(self._on_device, ids, ids), min=0, out=ids)

    def fill_nodes(self, nodes: Tensor) -> None:
        """Replace what is late in `nodes`, int64 [n, 2]: tokens and parents."""
        self.fill_ids(nodes[:, 0])

    def bring(self, wanted: Tensor, download: Downloader) -> list[int]:
        """The values of `wanted`, int64 [n]. The late tokens come in the same copy."""
        told: list[int] = download(torch.cat([wanted, self._on_device])).tolist()
        self._values = told[len(wanted) :]
        return told[: len(wanted)]

    @property
    def values(self) -> list[int]:
        """The tokens. Waits for them if they have not come yet."""
        if self._values is None:
            self._values = self._download(self._on_device).tolist()
        return self._values

    def parents(self, ids: Sequence[int]) -> list[int] | None:
        """The parents of these nodes as in `Draft.parents`, -2 for a row that is no node. None if the host
        knows them.
        """
        return None


def taken(values: Tensor, ids: Tensor, others: Tensor) -> Tensor:
    """`values[i]` where `ids` [n] has `~i`, and `others` [n] where it has none."""
    return torch.where(ids < 0, values.index_select(0, ids.bitwise_not().clamp_min_(0)), others)


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
