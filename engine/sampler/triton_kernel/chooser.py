"""The sampler of a CUDA device: a kernel finds the likeliest tokens, a second draws, a third writes
distributions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
import triton
from torch import Tensor

from engine.copies import ALIGNMENT, Downloader, upload_to
from engine.sampler.noise import Purpose, round_seeds
from engine.sampler.rows import Batch, EditLists, TokenChoice
from engine.sampler.triton_kernel.scan import scan
from engine.sampler.triton_kernel.settle import sift, weigh
from engine.triton_support import ceil_div

TILE = 4096
"""Tokens per program: enough programs for a single row, and few partial results."""

_GROUP, _WIDTH = 64, 16
_OPTIONS = {"num_warps": 8, "enable_fp_fusion": False}
"""Options of all kernels. Fused multiply-adds would round differently from the host."""
_REGISTERS = 128
"""Registers per thread of `sift`: with more, only one program fits a multiprocessor."""
LISTS_BYTES = 384 * 1024**2
"""The most memory for edited logits and candidate lists. A step with more rows takes several launches."""

_ALIGNED_ROWS = 16
"""The row alignment of launches, so that no tensor's address needs another compilation."""
_LISTED_BYTES = 18
"""The bytes of a listed token: its edited logit, value, weight and place in the tile."""


class Chosen(NamedTuple):
    """The tokens of n rows, and the tensors from which `shares` computes the rows' probabilities."""

    tokens: Tensor
    """int64 [n], -1 where no token has a finite score."""
    logits: Tensor
    """[n, vocab] with all edits applied; contiguous along the vocabulary."""
    numbers: Tensor
    """float64 [3, n]: temperatures (0 for greedy rows), min-p floors and top-p."""
    scales: Tensor
    """float64 [n, 3], if a row is not greedy: its greatest logit, then the least value that can be chosen and
    the sum of exp over all that can. A value is (logit - greatest) / temperature.
    """
    arrivals: Tensor
    """int32 [n], zeros: kernels count a row's finished programs here, and the last one leaves zero again."""


class TritonSampler:
    """A sampler with the same token for a row in any batch: sums run in the row's own token order."""

    on_device = True

    def __init__(self, device: torch.device) -> None:
        self._upload, self._download = upload_to(device), Downloader(device)
        self._arrivals = torch.zeros(0, dtype=torch.int32, device=device)

    def begin(self, batch: Batch) -> TokenChoice:
        """Launch the kernels and the download of the tokens; `wait` waits for that download only."""
        chosen = self.tokens(batch)
        arrive = self._download.begin(chosen)

        def wait() -> tuple[Tensor, list[int]]:
            found = arrive()
            return found.clamp_min(0), (found < 0).nonzero()[:, 0].tolist()

        return TokenChoice(chosen, wait)

    def probabilities(self, batch: Batch) -> Tensor:
        return self.shares(self.chosen(batch))

    def draw_drafts(self, batch: Batch, starts: Sequence[int]) -> tuple[Tensor, Tensor]:
        keys = round_seeds(batch.seeds, np.array(starts), Purpose.DRAFT)
        chosen = self._chosen(batch, keys, None, keeps=True)
        return chosen.tokens, self.shares(chosen)

    def tokens(self, batch: Batch, offsets: Tensor | None = None) -> Tensor:
        """Return the tokens on the device, -1 where none has a finite score. `offsets`, int64 [n], is added
        to the rows' positions.
        """
        return self._chosen(batch, batch.seeds, offsets, keeps=False).tokens

    def chosen(self, batch: Batch, offsets: Tensor | None = None) -> Chosen:
        """Like `tokens`, but return all of `Chosen`, valid until the next call."""
        return self._chosen(batch, batch.seeds, offsets, keeps=True)

    @staticmethod
    def shares(chosen: Chosen) -> Tensor:
        """Return the distributions of the tokens, float32 [n, vocab]: zeros where no score is finite."""
        count, size = chosen.logits.shape
        shares = torch.empty((count, size), device=chosen.logits.device)
        weigh[(ceil_div(size, TILE), count)](
            chosen.tokens,
            chosen.logits,
            chosen.numbers,
            chosen.scales,
            shares,
            chosen.logits.stride(0),
            SIZE=size,
            TILE=TILE,
            **_OPTIONS,
        )
        return shares

    def _chosen(self, batch: Batch, seeds: np.ndarray, offsets: Tensor | None, *, keeps: bool) -> Chosen:
        """Choose with the noise of `seeds`. With `keeps`, fill logits and scales for `shares`, too."""
        logits, edits, count = batch.logits, batch.edits, len(batch.index)
        if len(logits) != count:
            raise ValueError(f"{count} rows of logits, got {tuple(logits.shape)}")
        if logits.stride(1) != 1 or logits.data_ptr() % ALIGNMENT:
            logits = logits.clone(memory_format=torch.contiguous_format)
        request_rows = batch.requests.device_rows(np.array(batch.index), batch.positions, seeds)
        integers, numbers, *listed = self._upload([*request_rows, *(edits or ())])
        if offsets is not None:
            integers[1] += offsets
        is_greedy = bool(batch.requests.greedy.all())

        def kept(dtype: torch.dtype, *shape: int) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=logits.device)

        most = LISTS_BYTES // (logits.shape[1] * _LISTED_BYTES)
        together = max(1, most // _ALIGNED_ROWS) * _ALIGNED_ROWS
        edited = None
        if edits is not None:
            edited = kept(torch.float32, count if keeps else min(count, together), logits.shape[1])
        if len(self._arrivals) < count:
            self._arrivals = torch.zeros(
                triton.next_power_of_2(count), dtype=torch.int32, device=logits.device
            )
        tokens, arrivals = kept(torch.int64, count), self._arrivals[:count]
        scales = kept(torch.float64, count, 3)
        for first in range(0, count, together):
            rows = slice(first, first + together)
            some, target = None, logits[rows]
            if edits is not None and edited is not None:
                bounds, listed_tokens, amounts, factors, masked, masks = listed
                some = EditLists(bounds[rows], listed_tokens, amounts, factors[rows], masked[rows], masks)
                target = edited[rows] if keeps else edited[: len(target)]
            part = Chosen(tokens[rows], target, numbers[:, rows], scales[rows], arrivals[rows])
            choose(logits[rows], integers[:, rows], some, part, is_greedy=is_greedy, keeps=keeps)
        return Chosen(tokens, logits if edited is None else edited, numbers, scales, arrivals)


def choose(
    logits: Tensor, integers: Tensor, edits: EditLists | None, chosen: Chosen, *, is_greedy: bool, keeps: bool
) -> None:
    """Fill `chosen`, except the given `numbers`, and the `logits` if there are no `edits`. Fill its scales
    only with `keeps`.
    """
    count, size = logits.shape
    tiles = ceil_div(size, TILE)
    padded = triton.next_power_of_2(tiles)

    def kept(dtype: torch.dtype, *each: int) -> Tensor:
        return torch.empty((count, tiles, *each), dtype=dtype, device=logits.device)

    limits = torch.empty((count, 3), dtype=torch.float32, device=logits.device)
    scan[(tiles, count)](
        logits,
        None if edits is None else chosen.logits,
        *(edits or (None,) * 6),
        integers,
        chosen.numbers,
        kept(torch.float32),
        kept(torch.int32),
        kept(torch.float32, TILE // _GROUP),
        chosen.arrivals,
        chosen.tokens,
        limits,
        logits.stride(0),
        integers.stride(0),
        SIZE=size,
        WORDS=0 if edits is None else edits.masks.shape[1],
        GROUP=_GROUP,
        TILES=tiles,
        TILE=TILE,
        PADDED=padded,
        **_OPTIONS,
    )
    if is_greedy:
        return
    sift[(tiles, count)](
        chosen.logits,
        limits,
        integers,
        chosen.numbers,
        kept(torch.int32),
        kept(torch.float64),
        kept(torch.float32, TILE),
        kept(torch.int64, TILE),
        kept(torch.int16, TILE),
        chosen.arrivals,
        chosen.tokens,
        chosen.scales if keeps else None,
        chosen.logits.stride(0),
        integers.stride(0),
        SIZE=size,
        TILES=tiles,
        TILE=TILE,
        PADDED=padded,
        WIDTH=_WIDTH,
        maxnreg=_REGISTERS,
        **_OPTIONS,
    )
