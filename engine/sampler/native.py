"""Sampling in one compiled call, for logits on a CPU."""

from __future__ import annotations

import ctypes
import functools
import logging
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from engine.sampler.batch import RequestParams, SamplingArgs
from engine.sampler.masks import TokenMasks
from native.build import BuildError, declare, load_library
from native.threads import parallel

logger = logging.getLogger("tandem.engine")

_SUFFIXES = {torch.bfloat16: "bf16", torch.float32: "float"}
_GIL_FREE_LOGITS = 2**19
"""Calls on fewer logits keep the interpreter lock: taking it back from a busy thread would cost more."""


class LogitsArgs(ctypes.Structure):
    """`Logits` of `choose.cpp`, which explains the fields."""

    _fields_ = (
        ("logits", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("stride", "size", "count")),
        *((name, ctypes.c_void_p) for name in ("requests", "numbers", "positions", "chosen", "masks")),
    )


class DraftedArgs(ctypes.Structure):
    """`Drafted` of `choose.cpp`."""

    _fields_ = (("rows", LogitsArgs), ("starts", ctypes.c_void_p), ("distributions", ctypes.c_void_p))


@functools.cache
def compiled() -> NativeSampler | None:
    """The compiled sampler, built at the first call; None where it can't be."""
    try:
        return NativeSampler()
    except BuildError as error:
        logger.warning("tokens are sampled by torch's operators: %s", error)
        return None


class NativeSampler:
    """Raises BuildError where the kernel cannot be built."""

    def __init__(self) -> None:
        source = Path(__file__).parent / "choose.cpp"
        structs = SamplingArgs, LogitsArgs, DraftedArgs
        self._choose = RowsFunction(source, "tandem_choose", *structs)
        self._draw = RowsFunction(source, "tandem_draw", *structs)

    def __call__(
        self,
        logits: Tensor,
        requests: RequestParams,
        index: Sequence[int],
        positions: Sequence[int],
        masks: TokenMasks | None = None,
    ) -> tuple[Tensor, list[int]]:
        """The token of each row of `logits` [n, vocab], any float dtype, int64 [n], and the rows that failed.

        `index` names each row's request, `positions` are those of the tokens.
        """
        logits = readable(logits, len(index))
        rows = np.array((index, positions), np.int64)
        chosen = torch.empty(len(index), dtype=torch.int64)
        if self._choose(_rows(logits, requests, rows, chosen, masks), logits) == 0:
            return chosen, []
        failed_rows = (chosen < 0).nonzero()[:, 0].tolist()
        return chosen.clamp_min_(0), failed_rows

    def draw_drafts(
        self,
        logits: Tensor,
        requests: RequestParams,
        index: Sequence[int],
        positions: Sequence[int],
        starts: Sequence[int],
        masks: TokenMasks | None = None,
    ) -> tuple[Tensor, Tensor]:
        """As `Sampler.draw_drafts`, for rows as when called."""
        logits = readable(logits, len(index))
        rows = np.array((index, positions, starts), np.int64)
        chosen = torch.empty(len(index), dtype=torch.int64)
        distributions = torch.empty(logits.shape)
        starts_address = rows.ctypes.data + 2 * rows.strides[0]
        fields = _rows(logits, requests, rows, chosen, masks)
        self._draw(DraftedArgs(fields, starts_address, distributions.data_ptr()), logits)
        return chosen, distributions

    def probabilities(
        self, logits: Tensor, requests: RequestParams, index: Sequence[int], masks: TokenMasks | None = None
    ) -> Tensor:
        """As `Sampler.probabilities`, for rows as when called."""
        logits = readable(logits, len(index))
        rows, unused = np.array((index, index), np.int64), torch.empty(0, dtype=torch.int64)
        distributions = torch.empty(logits.shape)
        fields = _rows(logits, requests, rows, unused, masks)
        self._draw(DraftedArgs(fields, None, distributions.data_ptr()), logits)
        return distributions


class RowsFunction:
    """A compiled function over rows of logits: `name`_bf16 and `name`_float, which take a struct's address,
    a number of threads and OpenMP's function to run them. Raises BuildError.
    """

    def __init__(self, source: Path, name: str, *structs: type[ctypes.Structure]) -> None:
        short, long = load_library(source, *structs, keep_gil=True), load_library(source, *structs)
        types = ctypes.c_int64, ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p
        self._short, self._long = (
            {dtype: declare(library, f"{name}_{suffix}", *types) for dtype, suffix in _SUFFIXES.items()}
            for library in (short, long)
        )

    def __call__(self, fields: ctypes.Structure, logits: Tensor) -> int:
        functions = self._short if logits.numel() < _GIL_FREE_LOGITS else self._long
        result: int = functions[logits.dtype](ctypes.byref(fields), torch.get_num_threads(), parallel())
        return result


def readable(logits: Tensor, num_rows: int) -> Tensor:
    """The same [n, vocab] as a `RowsFunction` can read them. Raises ValueError where n is not `num_rows`."""
    if logits.shape[0] != num_rows:
        raise ValueError(f"{num_rows} rows of logits, got {tuple(logits.shape)}")
    if logits.dtype not in _SUFFIXES:
        logits = logits.float()
    return logits if logits.stride(1) == 1 else logits.contiguous()


def _rows(
    logits: Tensor, requests: RequestParams, rows: np.ndarray, chosen: Tensor, masks: TokenMasks | None
) -> LogitsArgs:
    """`rows`, int64 [2 or more, n], begin with index and positions."""
    numbers = rows.ctypes.data
    return LogitsArgs(
        logits.data_ptr(),
        logits.stride(0),
        *logits.shape[::-1],
        requests.table_address,
        numbers,
        numbers + rows.strides[0],
        chosen.data_ptr(),
        None if masks is None else masks.addresses.ctypes.data,
    )
