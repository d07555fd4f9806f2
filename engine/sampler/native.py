"""Sampling in one compiled call, for logits on a CPU."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from engine.sampler.rows import Batch, EditLists, TokenChoice
from native.build import load_library, optional
from native.structs import fields
from native.threads import parallel

logger = logging.getLogger("tandem.engine")

_SOURCE = Path(__file__).parent / "choose.cpp"
_SUFFIXES = {torch.bfloat16: "bf16", torch.float32: "float"}
_GIL_FREE_LOGITS = 2**19
"""Logits below which a call keeps the GIL: taking it back from a busy thread would cost more."""


class EditsArgs(ctypes.Structure):
    _fields_ = fields(_SOURCE.with_name("chooser.h"), "Edits")

    @classmethod
    def of(cls, edits: EditLists | None) -> EditsArgs:
        return cls() if edits is None else cls(*(each.ctypes.data for each in edits[:4]))


class LogitsArgs(ctypes.Structure):
    _fields_ = fields(_SOURCE, "Logits", EditsArgs)


class DraftedArgs(ctypes.Structure):
    _fields_ = fields(_SOURCE, "Drafted", LogitsArgs)


@optional(logger, "tokens are sampled by torch's operators")
def compiled() -> NativeSampler:
    return NativeSampler()


class NativeSampler:
    """The compiled sampler. Its constructor raises BuildError if the kernel cannot be built."""

    on_device = False

    def __init__(self) -> None:
        self._choose = RowsFunction(_SOURCE, "tandem_choose")
        self._draw = RowsFunction(_SOURCE, "tandem_draw")

    def begin(self, batch: Batch) -> TokenChoice:
        chosen = torch.empty(len(batch.index), dtype=torch.int64)
        with_rows = _Rows(batch, chosen)
        if self._choose(with_rows.fields, with_rows.logits) == 0:
            return TokenChoice.made(chosen, [])
        failed_rows = (chosen < 0).nonzero()[:, 0].tolist()
        return TokenChoice.made(chosen.clamp_min_(0), failed_rows)

    def draw_drafts(self, batch: Batch, starts: Sequence[int]) -> tuple[Tensor, Tensor]:
        chosen, began = torch.empty(len(batch.index), dtype=torch.int64), np.array(starts, np.int64)
        return chosen, self._distributions(batch, chosen, began.ctypes.data)

    def probabilities(self, batch: Batch) -> Tensor:
        return self._distributions(batch, torch.empty(0, dtype=torch.int64), None)

    def _distributions(self, batch: Batch, chosen: Tensor, starts: int | None) -> Tensor:
        with_rows = _Rows(batch, chosen)
        distributions = torch.empty(with_rows.logits.shape)
        self._draw(DraftedArgs(with_rows.fields, starts, distributions.data_ptr()), with_rows.logits)
        return distributions


class _Rows:
    """A batch in the form that compiled calls read, with the arrays that its addresses point to."""

    def __init__(self, batch: Batch, chosen: Tensor) -> None:
        self.logits = readable(batch.logits, len(batch.index))
        self._numbers = np.array((batch.index, batch.positions), np.int64)
        first, (step, _) = self._numbers.ctypes.data, self._numbers.strides
        self.fields = LogitsArgs(
            self.logits.data_ptr(),
            self.logits.stride(0),
            *self.logits.shape[::-1],
            batch.requests.table_address,
            first,
            first + step,
            chosen.data_ptr(),
            None if batch.masks is None else batch.masks.addresses.ctypes.data,
            EditsArgs.of(batch.edits),
        )


class RowsFunction:
    """A compiled function over rows of logits: `name`_bf16 and `name`_float take a struct's address, a number
    of threads and the function that runs them. The constructor raises BuildError.
    """

    def __init__(self, source: Path, name: str) -> None:
        self._short, self._long = (
            {dtype: getattr(library, f"{name}_{suffix}") for dtype, suffix in _SUFFIXES.items()}
            for library in (load_library(source, keep_gil=True), load_library(source))
        )

    def __call__(self, args: ctypes.Structure, logits: Tensor) -> int:
        functions = self._short if logits.numel() < _GIL_FREE_LOGITS else self._long
        result: int = functions[logits.dtype](ctypes.byref(args), torch.get_num_threads(), parallel())
        return result


def readable(logits: Tensor, num_rows: int) -> Tensor:
    """Return logits that a `RowsFunction` can read. Raise ValueError unless there are `num_rows` rows."""
    if logits.shape[0] != num_rows:
        raise ValueError(f"{num_rows} rows of logits, got {tuple(logits.shape)}")
    if logits.dtype not in _SUFFIXES:
        logits = logits.float()
    return logits if logits.stride(1) == 1 else logits.contiguous()
