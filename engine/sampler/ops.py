"""Steps over [n, vocab] that deserve care: on a CPU numpy has vector instructions where torch has none."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

_CPU_CHUNK = 2**16
_DEVICE_CHUNK = 2**24
_NEGLIGIBLE = -60.0
_BITS = {
    torch.bfloat16: (torch.int16, np.uint16, 0x7F80, 0xFF80),
    torch.float16: (torch.int16, np.uint16, 0x7C00, 0xFC00),
    torch.float32: (torch.int32, np.uint32, 0x7F800000, 0xFF800000),
}
"""Integers of the same size, signed and unsigned, and the bits of both infinities."""


def column_chunks(values: Tensor) -> Iterator[tuple[int, Tensor]]:
    """First column and view of pieces of [n, m] small enough that what is made of them stays in the cache."""
    limit = _CPU_CHUNK if values.device.type == "cpu" else _DEVICE_CHUNK
    size = max(1, limit // len(values))
    for start in range(0, values.shape[1], size):
        yield start, values[:, start : start + size]


def argmax_rows(values: Tensor) -> Tensor:
    """int64 [n]: where each row of float32 [n, m] has its maximum, the lowest index among equals."""
    if values.device.type == "cpu":
        return torch.from_numpy(values.numpy().argmax(axis=-1))
    return values.argmax(dim=-1)


def likeliest(logits: Tensor) -> tuple[Tensor, list[int]]:
    """Where each row of [n, m], any float dtype, has its maximum (int64 [n], the lowest index among equals),
    and the rows whose maximum is not finite.
    """
    quick = _likeliest_by_bits(logits)
    if quick is not None:
        return quick, []
    values = logits.float()
    chosen = argmax_rows(values)
    return chosen, unusable_rows(values.gather(1, chosen.unsqueeze(1)))


def unusable_rows(best: Tensor) -> list[int]:
    """Those whose greatest value [n, 1] is not finite."""
    usable = best.isfinite()
    return [] if usable.all() else (~usable).nonzero()[:, 0].tolist()


def _likeliest_by_bits(logits: Tensor) -> Tensor | None:
    """Only on a CPU, and where each row's greatest is a number above 0, with no NaN beside it: positive
    numbers are in the order of their bits, and a CPU compares integers many times faster than it makes
    floats.
    """
    if logits.device.type != "cpu" or logits.dtype not in _BITS:
        return None
    signed, unsigned, infinity, negative_infinity = _BITS[logits.dtype]
    bits = logits.view(signed).numpy()
    best = bits.argmax(axis=1)
    top = bits[np.arange(len(bits)), best]
    if top.min() <= 0 or top.max() >= infinity or bits.view(unsigned).max() > negative_infinity:
        return None
    return torch.from_numpy(best)


def at_least(values: Tensor, floor: Tensor) -> Tensor:
    """Bool: values >= floor, of float32 that broadcast."""
    if values.device.type == "cpu":
        return torch.from_numpy(values.numpy() >= floor.numpy())
    return values >= floor


def true_indices(mask: Tensor) -> tuple[Tensor, Tensor]:
    """Row and column (int64 [k] each) of every true entry of bool [n, m], in row-major order."""
    if mask.device.type != "cpu":
        rows, columns = mask.nonzero(as_tuple=True)
        return rows, columns
    flat = torch.from_numpy(np.flatnonzero(mask.numpy()))
    num_rows, width = mask.shape
    starts = torch.searchsorted(flat, torch.arange(num_rows + 1) * width)
    rows = torch.repeat_interleave(starts.diff())
    return rows, flat - rows * width


def exp_(values: Tensor) -> Tensor:
    """exp in place, at least 1e-26: a CPU takes thirty times longer where the result is denormal."""
    return values.clamp_min_(_NEGLIGIBLE).exp_()


def sort_rows_descending(values: Tensor) -> Tensor:
    """The rows of float32 [n, m], each sorted, largest first."""
    if values.device.type == "cpu":
        return torch.from_numpy(np.sort(values.numpy(), axis=-1)).flip(-1)
    return values.sort(dim=-1, descending=True).values
