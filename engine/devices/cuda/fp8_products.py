"""Products of FP8 weights with inputs that are rounded to FP8, by `torch._scaled_mm`.

An input row is rounded alone, with a scale of its own or, for weights with a scale for every 128 inputs, with
one for each 128 of its values.
"""

from __future__ import annotations

from typing import ClassVar, Self

import torch
from torch import Tensor

from engine.devices.cuda.library_products import FP8_BLOCKS, FP8_ROWS, Library, LibraryProduct
from engine.devices.cuda.product_kernel import round_rows
from engine.quantization.weight import CodeFormat, QuantizedWeight
from engine.triton_support import ceil_div, power_of_two

_BLOCK = 128
_MULTIPLE = 16
"""The number of which a weight's inputs and outputs are multiples."""
_ROWS = 4
"""The number of which cuBLAS wants rows of scales to be a multiple."""


class Fp8Product(LibraryProduct):
    """An FP8 weight: codes float8_e4m3fn [outputs, inputs], scales float32."""

    library = FP8_ROWS
    output_dims: ClassVar[dict[str, int]] = {**LibraryProduct.output_dims, "codes": 0}

    @classmethod
    def library_of(cls, weight: QuantizedWeight) -> Library | None:
        outputs, inputs = weight.codes.shape
        if weight.format is not CodeFormat.FP8 or inputs % _MULTIPLE or outputs % _MULTIPLE:
            return None
        if weight.scales.shape[1] == 1:
            return FP8_ROWS
        return FP8_BLOCKS if weight.group_size == _BLOCK else None

    @classmethod
    def of(cls, weight: QuantizedWeight, bias: Tensor | None, dtype: torch.dtype) -> Self:
        own = None if bias is None else bias.detach().to(dtype)
        codes = weight.codes.contiguous()
        return cls(codes.shape[1], codes, weight.scales.t().contiguous(), None, own)

    def __call__(self, rows: Tensor) -> Tensor:
        codes, scales = rounded(rows, len(self.scales))
        # One scale a row must be contiguous by stride, too; several a row must have rows side by side.
        own = scales.view(-1, 1) if len(scales) == 1 else scales.t()
        made = torch._scaled_mm(codes, self.codes.t(), own, self.scales, bias=self.bias, out_dtype=rows.dtype)
        return made[: len(rows)]


def rounded(rows: Tensor, groups: int) -> tuple[Tensor, Tensor]:
    """Round rows [rows, inputs] to FP8, and return their scales [groups, rows]. Both have some rows more,
    which are undefined.
    """
    count, inputs = rows.shape
    padded, size = ceil_div(count, _ROWS) * _ROWS, inputs // groups
    codes = torch.empty((padded, inputs), dtype=torch.uint8, device=rows.device)
    scales = torch.empty((groups, padded), dtype=torch.float32, device=rows.device)
    if count:
        warps = 1 if size <= _BLOCK else 8
        round_rows[(count, groups)](
            rows, codes, scales, rows.stride(0), padded, SIZE=size, PADDED=power_of_two(size), num_warps=warps
        )
    return codes.view(torch.float8_e4m3fn), scales
