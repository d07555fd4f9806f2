"""A batch of rows to sample, and the interface of a sampler for one kind of device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
from torch import Tensor

from engine.sampler.edits import EditLists
from engine.sampler.rows import RequestParams, SamplingRow, TokenMasks


@dataclass(slots=True, eq=False)
class Batch:
    """Rows of logits [n, vocab], of any float dtype, which sampling does not change; n is at least 1."""

    logits: Tensor
    rows: Sequence[SamplingRow]
    requests: RequestParams
    index: list[int]
    """Number of each row's request in `requests`."""
    edits: EditLists | None
    """Edits of the rows' logits, if there are any."""
    masks: TokenMasks | None

    @property
    def seeds(self) -> np.ndarray:
        return self.requests.table["seed"][np.array(self.index)]

    @property
    def positions(self) -> list[int]:
        return [row.position for row in self.rows]


class TokenChoice(NamedTuple):
    """The tokens of a batch. `token_ids`, int64 [rows], are on the logits' device; entries of failed rows are
    undefined and may be negative. `wait` returns the tokens on the host, where failed rows have some valid
    id, and the failed rows."""

    token_ids: Tensor
    wait: Callable[[], tuple[Tensor, list[int]]]

    @classmethod
    def made(cls, token_ids: Tensor, failed_rows: list[int]) -> TokenChoice:
        """Make a choice that needs no waiting."""
        return cls(token_ids, lambda: (token_ids, failed_rows))


class RowSampler(Protocol):
    """A sampler for one kind of device. All samplers choose the same tokens."""

    on_device: bool
    """Whether kernels choose on the device, so that the host need not wait."""

    def begin(self, batch: Batch) -> TokenChoice:
        """Choose a token for each row. If kernels choose, do not wait for the device."""

    def probabilities(self, batch: Batch) -> Tensor:
        """Return the rows' distributions, float32 [n, vocab]; zeros in rows that fail."""

    def draw_drafts(self, batch: Batch, starts: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Draw draft tokens with noise of `Purpose.DRAFT`, in rounds that began at positions `starts`. Return
        the tokens, int64 [n], and their distributions, float32 [n, vocab].
        """
