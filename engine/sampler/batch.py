"""A batch of rows to sample from, and the interface of what samples from it on one kind of device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from torch import Tensor

from engine.sampler.edits import EditLists
from engine.sampler.rows import RequestParams, SamplingRow, TokenMasks


@dataclass(slots=True, eq=False)
class Batch:
    """Rows of logits [n, vocab], any float dtype, which stay as they are; n is at least 1."""

    logits: Tensor
    rows: Sequence[SamplingRow]
    requests: RequestParams
    index: list[int]
    """The number of each row's request."""
    edits: EditLists | None
    """How rows' logits are edited, if any are."""
    masks: TokenMasks | None

    @property
    def positions(self) -> list[int]:
        return [row.position for row in self.rows]


class TokenChoice(NamedTuple):
    """`token_ids`, int64 [rows], lie where the logits do; what a row that fails has there means nothing, and
    may be negative. `wait` brings them to the host, and the rows that failed; those have some token there.
    """

    token_ids: Tensor
    wait: Callable[[], tuple[Tensor, list[int]]]

    @classmethod
    def made(cls, token_ids: Tensor, failed_rows: list[int]) -> TokenChoice:
        """Return one that needs no waiting."""
        return cls(token_ids, lambda: (token_ids, failed_rows))


class RowSampler(Protocol):
    """Chooses tokens on one kind of device. All choose the same ones."""

    on_device: bool
    """Whether kernels choose on the device, so that the host need not wait."""

    def begin(self, batch: Batch) -> TokenChoice:
        """Choose a token for each row, without waiting for the device where kernels choose."""

    def probabilities(self, batch: Batch) -> Tensor:
        """Return what rows' tokens are drawn from, float32 [n, vocab]; zeros in rows that fail."""

    def draw_drafts(self, batch: Batch, starts: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Draw tokens int64 [n] with noise of `Purpose.DRAFT`, in rounds that began at `starts`. Return them
        and float32 [n, vocab] what they are drawn from.
        """
