"""The formats of a row (one head's key or value of one token) in the pool: the model's values, or codes.

A coded row has one byte for each value, and a float32 scale: a value is its code times the scale. A token's
scales follow the codes of all its heads, so that rows are aligned. The scale is the row's largest magnitude
divided by the largest code, so nothing is clipped and zero stays zero. A row is written once, from its own
values only. So its bytes depend neither on other tokens of the batch nor on later tokens in its block, as
they would with one scale for each block.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from protocol.handoff import ROW_QUANTIZATIONS, SCALE_BYTES

CODE_DTYPES = {
    ROW_QUANTIZATIONS["int8"]: torch.int8,
    ROW_QUANTIZATIONS["fp8"]: torch.float8_e4m3fn,
}
"""The data types of codes by `SegmentInfo.quantization`. FP8 is OCP's E4M3 without infinities."""

_LARGEST_CODE = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
_SMALLEST = 1e-30
"""Largest magnitude below which a row is stored as zeros, so that the inverse of a scale stays finite."""

_CODED_MULTIPLE, _LARGEST_CODED = 4, 512
"""Limits of head_dim for coded rows: a multiple of 4 aligns the scales, and the CPU kernel's integer sums
of up to 512 products do not overflow."""


class StoredRows(NamedTuple):
    """Rows in the pool: `values` of `KvRows.stored_dtype`; `scales` of coded rows, float32, else None."""

    values: Tensor
    scales: Tensor | None

    def heads(self, own: slice) -> StoredRows:
        return StoredRows(self.values[..., own, :], None if self.scales is None else self.scales[..., own])

    def part(self, *index: int | slice) -> StoredRows:
        """Return a part of values and scales; `index` applies to the dimensions before head_dim."""
        return StoredRows(self.values[index], None if self.scales is None else self.scales[index])


@dataclass(frozen=True)
class KvRows:
    """The format of rows that the model computes in `dtype`; `quantization` is "none" or in `CODE_DTYPES`."""

    dtype: torch.dtype
    quantization: str = "none"

    def __str__(self) -> str:
        if self.coded:
            return self.quantization.removesuffix("_row_scales")
        return str(self.dtype).removeprefix("torch.")

    @property
    def coded(self) -> bool:
        return self.quantization != "none"

    @property
    def stored_dtype(self) -> torch.dtype:
        """The dtype of the pool's views: bytes for coded rows."""
        return torch.uint8 if self.coded else self.dtype

    def row_bytes(self, head_dim: int) -> int:
        return head_dim * self.stored_dtype.itemsize + (SCALE_BYTES if self.coded else 0)

    def fault(self, head_dim: int) -> str | None:
        """Return why rows of this size cannot be stored in this format; None if they can."""
        if not self.coded or (head_dim % _CODED_MULTIPLE == 0 and head_dim <= _LARGEST_CODED):
            return None
        return f"{head_dim} values in a head are not a multiple of {_CODED_MULTIPLE} up to {_LARGEST_CODED}"

    def encode(self, rows: Tensor) -> StoredRows:
        """Encode rows of `dtype` [..., head_dim] as values of this shape and scales [...]. A row with a value
        that is not finite decodes to NaN.
        """
        if not self.coded:
            return StoredRows(rows, None)
        code_dtype = CODE_DTYPES[self.quantization]
        values, largest = rows.float(), torch.tensor(_LARGEST_CODE[code_dtype], device=rows.device)
        top = values.abs().amax(-1, keepdim=True)
        finite, is_zero = top.isfinite(), top < _SMALLEST
        inverse = (largest / top).masked_fill(is_zero | ~finite, 0.0)
        scale = (top / largest).masked_fill(is_zero, 0.0).masked_fill(~finite, torch.nan)
        codes = (values * inverse).masked_fill(~finite, 0.0)
        codes = codes.round().to(code_dtype) if code_dtype is torch.int8 else codes.to(code_dtype)
        return StoredRows(codes.view(torch.uint8), scale.squeeze(-1))

    def decode(self, stored: StoredRows) -> Tensor:
        """Return the values of encoded rows, rounded to `dtype`."""
        if stored.scales is None:
            return stored.values
        codes = stored.values.view(CODE_DTYPES[self.quantization])
        return (codes.float() * stored.scales.unsqueeze(-1)).to(self.dtype)
