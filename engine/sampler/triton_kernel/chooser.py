"""Chooses the tokens of a batch on a CUDA device, in three kernels, or two where all rows are greedy. One
more writes down what they are drawn from.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from engine.download import Downloader
from engine.sampler.batch import RequestParams
from engine.sampler.choice import TokenChoice
from engine.sampler.triton_kernel.edits import EditLists
from engine.sampler.triton_kernel.scan import scan
from engine.sampler.triton_kernel.settle import settle
from engine.sampler.triton_kernel.sift import sift
from engine.sampler.triton_kernel.weigh import weigh
from engine.upload import upload_to

TILE = 4096
"""Tokens of a program: enough programs for a single row, and few parts."""

_GROUP, _WIDTH = 64, 16
_WARPS = 8
LISTS_BYTES = 256 * 1024**2
"""Of edited logits and what may be chosen. A step with more rows takes several launches."""

_LISTED_BYTES = 10
"""Of a token: two float32 and its place."""


class TritonSampler:
    """A row's token is the same alone and in any batch: sums are in the order of the row's own tokens."""

    def __init__(self, device: torch.device) -> None:
        self._upload, self._download = upload_to(device), Downloader(device)

    def __call__(
        self,
        logits: Tensor,
        requests: RequestParams,
        index: Sequence[int],
        positions: Sequence[int],
        edits: EditLists | None = None,
    ) -> TokenChoice:
        """For rows as `NativeSampler` takes them. Whoever waits does so for the tokens and nothing else."""
        chosen = self.tokens(logits, requests, index, positions, edits)
        arrive = self._download.begin(chosen)

        def wait() -> tuple[Tensor, list[int]]:
            found = arrive()
            return found.clamp_min(0), (found < 0).nonzero()[:, 0].tolist()

        return TokenChoice(chosen, wait)

    def tokens(
        self,
        logits: Tensor,
        requests: RequestParams,
        index: Sequence[int],
        positions: Sequence[int],
        edits: EditLists | None = None,
    ) -> Tensor:
        """The same on the device, -1 where none has a finite score."""
        return self._chosen(logits, requests, index, positions, requests.seeds[np.array(index)], edits, None)

    def weighed(
        self,
        logits: Tensor,
        requests: RequestParams,
        index: Sequence[int],
        positions: Sequence[int],
        edits: EditLists | None = None,
        seeds: np.ndarray | None = None,
    ) -> tuple[Tensor, Tensor]:
        """And float32 [n, vocab], what they are drawn from: only zeros where none has a finite score. Without
        `seeds` of the rows' noise it is that of their requests.
        """
        seeds = requests.seeds[np.array(index)] if seeds is None else seeds
        shares = torch.empty(logits.shape, device=logits.device)
        return self._chosen(logits, requests, index, positions, seeds, edits, shares), shares

    def _chosen(
        self,
        logits: Tensor,
        requests: RequestParams,
        index: Sequence[int],
        positions: Sequence[int],
        seeds: np.ndarray,
        edits: EditLists | None,
        shares: Tensor | None,
    ) -> Tensor:
        if len(logits) != len(index):
            raise ValueError(f"{len(index)} rows of logits, got {tuple(logits.shape)}")
        if logits.stride(1) != 1:
            logits = logits.contiguous()
        integers, numbers, *listed = self._upload(
            [*_asked(requests, np.array(index), positions, seeds), *(edits or ())]
        )
        is_greedy = bool(requests.greedy.all())
        chosen = torch.empty(len(index), dtype=torch.int64, device=logits.device)
        together = max(1, LISTS_BYTES // (logits.shape[1] * _LISTED_BYTES))
        for first in range(0, len(index), together):
            rows = slice(first, first + together)
            some = None
            if edits is not None:
                bounds, tokens, amounts, factors, masked, masks = listed
                some = EditLists(bounds[rows], tokens, amounts, factors[rows], masked[rows], masks)
            own = None if shares is None else shares[rows]
            choose(logits[rows], integers[:, rows], numbers[:, rows], some, chosen[rows], is_greedy, own)
        return chosen


def _asked(
    requests: RequestParams, index: np.ndarray, positions: Sequence[int], seeds: np.ndarray
) -> list[np.ndarray]:
    """What `read_row` reads: int64 and float64 [3, n]."""
    temperature = np.where(requests.greedy, 0.0, requests.temperature).astype(np.float32)
    floor = requests.min_p_floor.astype(np.float32)
    top_p = np.where(requests.is_nucleus, requests.top_p, 1.0)
    return [
        np.array([seeds, positions, requests.top_k[index]]),
        np.array([temperature[index], floor[index], top_p[index]], np.float64),
    ]


def choose(
    logits: Tensor,
    integers: Tensor,
    numbers: Tensor,
    edits: EditLists | None,
    chosen: Tensor,
    is_greedy: bool,
    shares: Tensor | None = None,
) -> None:
    """`chosen`, int64 [n], gets each row's token, -1 where none has a finite score. `shares` [n, vocab], if
    they are there, get what they are drawn from.
    """
    count, size = logits.shape
    tiles = -(-size // TILE)
    padded = 1 << (tiles - 1).bit_length()
    shape = {"TILES": tiles, "TILE": TILE}
    # Fused products and sums would round otherwise than the host's.
    options = {"num_warps": _WARPS, "enable_fp_fusion": False}

    def kept(dtype: torch.dtype, *each: int) -> Tensor:
        return torch.empty((count, tiles, *each), dtype=dtype, device=logits.device)

    tops, firsts = kept(torch.float32), kept(torch.int32)
    peaks = kept(torch.float32, TILE // _GROUP)
    asked = integers, numbers
    edited = None if edits is None else torch.empty((count, size), device=logits.device)
    scan[(tiles, count)](
        logits,
        edited,
        *(edits or (None,) * 6),
        tops,
        firsts,
        peaks,
        logits.stride(0),
        SIZE=size,
        WORDS=0 if edits is None else edits.masks.shape[1],
        GROUP=_GROUP,
        **shape,
        **options,
    )
    logits = logits if edited is None else edited
    lists: tuple[Tensor | None, ...] = (None, None, None, None)
    weighs = shares is not None and not is_greedy
    floors, totals = (
        torch.empty(count, dtype=dtype, device=logits.device) if weighs else None
        for dtype in (torch.float32, torch.float64)
    )
    if not is_greedy:
        lists = (
            kept(torch.int32),
            kept(torch.float64),
            kept(torch.float32, TILE),
            kept(torch.int16, TILE),
        )
        sift[(tiles, count)](
            logits,
            tops,
            firsts,
            peaks,
            *asked,
            *lists,
            logits.stride(0),
            integers.stride(0),
            SIZE=size,
            GROUP=_GROUP,
            PADDED=padded,
            WEIGHED=weighs,
            **shape,
            **options,
        )
    settle[(count,)](
        tops,
        firsts,
        *asked,
        *lists,
        chosen,
        floors,
        totals,
        integers.stride(0),
        PADDED=padded,
        WIDTH=_WIDTH,
        **shape,
        **options,
    )
    if shares is not None:
        weigh[(tiles, count)](
            logits,
            tops,
            firsts,
            numbers,
            floors,
            totals,
            shares,
            logits.stride(0),
            SIZE=size,
            PADDED=padded,
            **shape,
            **options,
        )
