"""Chooses the tokens of a batch on a CUDA device, in two kernels. One more writes down what they are drawn
from.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
import triton
from torch import Tensor

from engine.copies import ALIGNMENT, Downloader, upload_to
from engine.sampler.batch import Batch, TokenChoice
from engine.sampler.edits import EditLists
from engine.sampler.noise import Purpose, round_seeds
from engine.sampler.triton_kernel.scan import scan
from engine.sampler.triton_kernel.settle import settle
from engine.sampler.triton_kernel.sift import sift
from engine.sampler.triton_kernel.weigh import weigh
from engine.triton_support import ceil_div

TILE = 4096
"""Tokens of a program: enough programs for a single row, and few parts."""

_GROUP, _WIDTH = 64, 16
_OPTIONS = {"num_warps": 8, "enable_fp_fusion": False}
"""Fused products and sums would round otherwise than the host's."""
_REGISTERS = 128
"""Registers of a thread that sifts: with more a multiprocessor has room for one program only."""
LISTS_BYTES = 256 * 1024**2
"""The most memory for edited logits and lists of candidates. A step with more rows takes several launches."""

_ALIGNED_ROWS = 16
"""Launches begin at such rows, so that no tensor's address needs another compilation."""
_LISTED_BYTES = 10
"""The bytes of a listed token: two float32 and its place."""


class Chosen(NamedTuple):
    """Rows' tokens, and from what the probabilities of these and of all others are computed."""

    tokens: Tensor
    """int64 [n], -1 where no token has a finite score."""
    logits: Tensor
    """[n, vocab], with all edits; tokens lie one behind the other."""
    numbers: Tensor
    """float64 [3, n], of which the first are temperatures, 0 for greedy rows."""
    scales: Tensor
    """float64 [n, 3], if a row is not greedy: its greatest logit; the least that may be chosen and what all
    of these weigh, of logits less the greatest and divided by the temperature.
    """
    arrivals: Tensor
    """int32 [n], zeros: in it a kernel counts a row's programs, so that the last one concludes."""


class TritonSampler:
    """A row's token is the same alone and in any batch: sums are in the order of the row's own tokens."""

    on_device = True

    def __init__(self, device: torch.device) -> None:
        self._upload, self._download = upload_to(device), Downloader(device)

    def begin(self, batch: Batch) -> TokenChoice:
        """Whoever waits does so for the tokens and nothing else."""
        chosen = self.tokens(batch)
        arrive = self._download.begin(chosen)

        def wait() -> tuple[Tensor, list[int]]:
            found = arrive()
            return found.clamp_min(0), (found < 0).nonzero()[:, 0].tolist()

        return TokenChoice(chosen, wait)

    def probabilities(self, batch: Batch) -> Tensor:
        return self.shares(self.chosen(batch))

    def draw_drafts(self, batch: Batch, starts: Sequence[int]) -> tuple[Tensor, Tensor]:
        keys = round_seeds(batch.requests.seeds[np.array(batch.index)], np.array(starts), Purpose.DRAFT)
        chosen = self._chosen(batch, keys, None, keeps=True)
        return chosen.tokens, self.shares(chosen)

    def tokens(self, batch: Batch, further: Tensor | None = None) -> Tensor:
        """Return the tokens on the device, -1 where none has a finite score. With `further`, int64 [n], rows
        are so much further than their positions.
        """
        return self._chosen(batch, batch.requests.seeds[np.array(batch.index)], further, keeps=False).tokens

    def chosen(self, batch: Batch, further: Tensor | None = None) -> Chosen:
        """As `tokens`, with what probabilities are computed from; it holds until the next call."""
        return self._chosen(batch, batch.requests.seeds[np.array(batch.index)], further, keeps=True)

    @staticmethod
    def shares(chosen: Chosen) -> Tensor:
        """float32 [n, vocab], what the tokens are drawn from: only zeros where none has a finite score."""
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

    def _chosen(self, batch: Batch, seeds: np.ndarray, further: Tensor | None, *, keeps: bool) -> Chosen:
        """Choose with the noise of these `seeds`. `keeps`: more than the tokens is wanted."""
        logits, edits, count = batch.logits, batch.edits, len(batch.index)
        if len(logits) != count:
            raise ValueError(f"{count} rows of logits, got {tuple(logits.shape)}")
        if logits.stride(1) != 1 or logits.data_ptr() % ALIGNMENT:
            logits = logits.clone(memory_format=torch.contiguous_format)
        told = batch.requests.device_rows(np.array(batch.index), batch.positions, seeds)
        integers, numbers, *listed = self._upload([*told, *(edits or ())])
        if further is not None:
            integers[1] += further
        is_greedy = bool(batch.requests.greedy.all())

        def kept(dtype: torch.dtype, *shape: int) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=logits.device)

        most = LISTS_BYTES // (logits.shape[1] * _LISTED_BYTES)
        together = max(1, most // _ALIGNED_ROWS) * _ALIGNED_ROWS
        edited = None
        if edits is not None:
            edited = kept(torch.float32, count if keeps else min(count, together), logits.shape[1])
        tokens, arrivals = kept(torch.int64, count), kept(torch.int32, count)
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
    """Fills `chosen`, but for its numbers, which are given, and for its logits where there are no `edits`.
    Scales are found if it `keeps` them.
    """
    count, size = logits.shape
    tiles = ceil_div(size, TILE)
    padded = triton.next_power_of_2(tiles)

    def kept(dtype: torch.dtype, *each: int) -> Tensor:
        return torch.empty((count, tiles, *each), dtype=dtype, device=logits.device)

    tops, firsts = kept(torch.float32), kept(torch.int32)
    peaks = kept(torch.float32, TILE // _GROUP)
    scan[(tiles, count)](
        logits,
        None if edits is None else chosen.logits,
        *(edits or (None,) * 6),
        tops,
        firsts,
        peaks,
        chosen.arrivals,
        logits.stride(0),
        SIZE=size,
        WORDS=0 if edits is None else edits.masks.shape[1],
        GROUP=_GROUP,
        TILES=tiles,
        TILE=TILE,
        **_OPTIONS,
    )
    if is_greedy:
        settle[(count,)](tops, firsts, chosen.tokens, TILES=tiles, PADDED=padded, **_OPTIONS)
        return
    sift[(tiles, count)](
        chosen.logits,
        tops,
        firsts,
        peaks,
        integers,
        chosen.numbers,
        kept(torch.int32),
        kept(torch.float64),
        kept(torch.float32, TILE),
        kept(torch.int16, TILE),
        chosen.arrivals,
        chosen.tokens,
        chosen.scales if keeps else None,
        chosen.logits.stride(0),
        integers.stride(0),
        SIZE=size,
        GROUP=_GROUP,
        TILES=tiles,
        TILE=TILE,
        PADDED=padded,
        WIDTH=_WIDTH,
        maxnreg=_REGISTERS,
        **_OPTIONS,
    )
