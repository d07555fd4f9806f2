"""Tokens that the device has chosen and the host does not know yet: of the step before, or drafted.

What runs and verifies them reads them on the device. The host gets them with what it waits for anyway.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.batch.step_inputs import StepInputs
from engine.download import Downloader


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
