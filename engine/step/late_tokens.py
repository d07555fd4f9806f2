"""Drafted tokens that the device has chosen and the host does not know yet. What runs and verifies them takes
them from the device, so that they come to the host with what it waits for anyway.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.batch.step_inputs import StepInputs
from engine.download import Downloader


class LateTokens:
    """Of all drafts that are made at once, int64 [n]. Ids below 0 name them: `~id` is the place here."""

    def __init__(self, on_device: Tensor, download: Downloader) -> None:
        """None of them is below 0."""
        self._on_device = on_device
        self._download = download
        self._values: list[int] | None = None

    def fill(self, ids: Tensor) -> None:
        """Put tokens, on the device, in the places of the `ids` [n] that name them."""
        ids.copy_(taken(self._on_device, ids, ids))

    def fill_rows(self, inputs: StepInputs) -> None:
        """Of a step, for the rows that name them."""
        self.fill(inputs.token_ids)

    def fill_nodes(self, nodes: Tensor) -> None:
        """int64 [n, 2]: tokens, or their names, and parents."""
        self.fill(nodes[:, 0])

    def bring(self, wanted: Tensor, download: Downloader) -> list[int]:
        """What is `wanted`, int64 [n], and the tokens beside it: the host waits once."""
        told: list[int] = download(torch.cat([wanted, self._on_device])).tolist()
        self._values = told[len(wanted) :]
        return told[: len(wanted)]

    @property
    def values(self) -> list[int]:
        """The host waits for them, if they have not come yet."""
        if self._values is None:
            self._values = self._download(self._on_device).tolist()
        return self._values

    def parents(self, names: Sequence[int]) -> list[int] | None:
        """As `Draft.parents`, where these are late too, and -2 of what is no node; else None."""
        return None


def taken(values: Tensor, names: Tensor, others: Tensor) -> Tensor:
    """The `values` that the `names` [n] name, and `others` [n] where they name none."""
    places = names.bitwise_not().clamp_min(0)
    return torch.where(names < 0, values.index_select(0, places), others)
