"""The sampler's choice in one compiled call, for logits on a CPU."""

from __future__ import annotations

import ctypes
import functools
import logging
import struct
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from engine.sampler.batch import RequestParams
from native.build import BuildError, load_library
from native.openmp import gomp_parallel

logger = logging.getLogger("tandem.engine")

_SUFFIXES = {torch.bfloat16: "bf16", torch.float32: "float"}
_GIL_FREE_LOGITS = 2**19
"""To choose from fewer takes less time than to take the interpreter lock back from a busy thread."""


@functools.cache
def compiled() -> Choice | None:
    """The compiled choice, built at the first call; None where it can't be."""
    try:
        return Choice()
    except BuildError as error:
        logger.warning("tokens are sampled by torch's operators: %s", error)
        return None


class Choice:
    """Raises BuildError where the kernel cannot be built."""

    def __init__(self) -> None:
        source = Path(__file__).parent / "choose.cpp"
        short, long = load_library(source, keep_gil=True), load_library(source)
        self._short = {dtype: _function(short, suffix) for dtype, suffix in _SUFFIXES.items()}
        self._long = {dtype: _function(long, suffix) for dtype, suffix in _SUFFIXES.items()}

    def __call__(
        self, logits: Tensor, requests: RequestParams, index: Sequence[int], positions: Sequence[int]
    ) -> tuple[Tensor, list[int]]:
        """The token of each row of `logits` [n, vocab], any float dtype, int64 [n], and the rows that failed.

        `index` names each row's request, `positions` are those of the tokens.
        """
        count = len(index)
        if logits.shape[0] != count:
            raise ValueError(f"{count} rows of logits, got {tuple(logits.shape)}")
        if logits.dtype not in _SUFFIXES:
            logits = logits.float()
        if logits.stride(1) != 1:
            logits = logits.contiguous()
        rows = np.array((index, positions), np.int64)
        chosen = torch.empty(count, dtype=torch.int64)
        numbers = rows.ctypes.data
        fields = struct.pack(
            "=Q3q4Q",
            logits.data_ptr(),
            logits.stride(0),
            logits.shape[1],
            count,
            requests.table_address,
            numbers,
            numbers + rows.strides[0],
            chosen.data_ptr(),
        )
        functions = self._short if logits.numel() < _GIL_FREE_LOGITS else self._long
        if functions[logits.dtype](fields, torch.get_num_threads(), gomp_parallel()) == 0:
            return chosen, []
        failed_rows = (chosen < 0).nonzero()[:, 0].tolist()
        return chosen.clamp_min_(0), failed_rows


def _function(library: ctypes.CDLL, suffix: str) -> ctypes._NamedFuncPointer:
    function = getattr(library, f"tandem_choose_{suffix}")
    function.argtypes = [ctypes.c_char_p, ctypes.c_int64, ctypes.c_void_p]
    function.restype = ctypes.c_int64
    return function
