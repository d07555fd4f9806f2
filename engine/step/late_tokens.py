"""Tokens that the device has chosen and the host does not know yet: sampled one step earlier, or drafted.

The shape of draft trees may be late, too. The forward and the verification read both on the device. The host
downloads them together with results that it waits for anyway.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.batch.step_inputs import StepInputs
from engine.copies import Downloader


class LateTokens:
    """Late tokens. In a step's rows and in drafts, `~i` is the placeholder of late token i."""

    def __init__(self, on_device: Tensor, download: Downloader) -> None:
        """Take the tokens `on_device`, int64 [n]. A negative one, whose row had no valid token, runs as 0."""
        self._on_device = on_device
        self._download = download
        self._values: list[int] | None = None

    def fill(self, inputs: StepInputs) -> None:
        """Write the tokens to the rows that hold their placeholders."""
        self.fill_ids(inputs.token_ids)

    def fill_ids(self, ids: Tensor) -> None:
        """Replace the placeholders in `ids` [n], in place on the device."""
        torch.clamp(taken(self._on_device, ids, ids), min=0, out=ids)

    def fill_nodes(self, nodes: Tensor) -> None:
        """Replace the placeholders in `nodes`, int64 [n, 2]: tokens and parents."""
        self.fill_ids(nodes[:, 0])

    def bring(self, wanted: Tensor, download: Downloader) -> list[int]:
        """Return the values of `wanted`, int64 [n], and download the late tokens in the same copy."""
        told: list[int] = download(torch.cat([wanted, self._on_device])).tolist()
        self._values = told[len(wanted) :]
        return told[: len(wanted)]

    @property
    def values(self) -> list[int]:
        """The late tokens on the host. Waits for the download if they have not been downloaded yet."""
        if self._values is None:
            self._values = self._download(self._on_device).tolist()
        return self._values

    def parents(self, ids: Sequence[int]) -> list[int] | None:
        """Return the parents of these nodes like `Draft.parents`, but -2 for a row that is no node. Return
        None if the host knows the parents already.
        """
        return None


def taken(values: Tensor, ids: Tensor, others: Tensor) -> Tensor:
    """Return `values[i]` where `ids` [n] has a placeholder `~i`, and `others` [n] elsewhere."""
    return torch.where(ids < 0, values.index_select(0, ids.bitwise_not().clamp_min_(0)), others)


class LateTrees(LateTokens):
    """Draft trees whose shape is late. To the host each tree is a star with the most nodes that it can have:
    all follow the sequence's last token. Nodes that the tree turns out to lack come last; they stay children
    of the root and are never accepted.
    """

    def __init__(self, nodes: Tensor, download: Downloader) -> None:
        """Take `nodes`, int64 [4, n]: tokens; the row of its tree that each node follows, -1 for no node;
        masks as in `AttentionMetadata.visible`; and each node's depth below the root's children.
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
        """Return int64 [n]: the depth below the root's children for each placeholder, 0 for other ids."""
        return taken(self._deeper, names, torch.zeros_like(names))

    def parents(self, names: Sequence[int]) -> list[int] | None:
        rows_before = self.values[len(self.values) // 2 :]
        return [rows_before[~name] - 1 for name in names]
