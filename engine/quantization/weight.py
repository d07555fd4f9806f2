"""A linear layer's quantized weights, whatever checkpoint or rounding they come from."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

import torch
from torch import Tensor


class CodeFormat(Enum):
    """The number format of a weight's codes, in the names of `--quantization`."""

    INT8 = "int8"  # -128 to 127
    INT4 = "int4"  # 0 to 15; zero is 8 unless there are zero points
    FP8 = "fp8"  # float8_e4m3fn
    MXFP4 = "mxfp4"  # the sixteen values of E2M1, by their index


E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""The values of E2M1 by code: OCP Microscaling Formats, section 5.3.3."""

INT4_ZERO = 8


def same_order(one: Tensor | None, other: Tensor | None) -> bool:
    """Return whether two orders of a weight's inputs are equal; None is the inputs' own order."""
    if one is None or other is None:
        return one is other
    return torch.equal(one, other)


@dataclass(frozen=True)
class QuantizedWeight:
    """A linear layer's codes [out_features, in_features], with their scales.

    `codes` is int8 for INT8, uint8 for INT4 and MXFP4, float8_e4m3fn for FP8. `scales`, and `zeros` for zero
    points (INT8 and INT4 only), are float32 [out_features, in_features / group_size]; MXFP4's scales are
    powers of two. With `permutation`, int64 [in_features], column k of the codes multiplies input
    `permutation[k]`: GPTQ's `desc_act`, sorted by group. A nonzero `input_group` (INT8 and INT4 only) is a
    number of adjacent inputs that may be rounded together to int8, in units of their largest magnitude / 127.
    """

    format: CodeFormat
    codes: Tensor
    scales: Tensor
    zeros: Tensor | None = None
    permutation: Tensor | None = None
    input_group: int = field(default=0, kw_only=True)

    @property
    def group_size(self) -> int:
        return self.codes.shape[1] // self.scales.shape[1]

    def describe(self) -> str:
        """Return the format and the number of weights that share a scale."""
        shared = f"in groups of {self.group_size}" if self.scales.shape[1] > 1 else "with a scale an output"
        return f"{self.format.value} {shared}{' and zero points' if self.zeros is not None else ''}"

    def dequantized(self) -> Tensor:
        """Return the weight in float32 [out_features, in_features], with columns in the inputs' order."""
        values = self._values()
        if self.zeros is not None:
            values = values - self.zeros.repeat_interleave(self.group_size, dim=1)
        weight = values * self.scales.repeat_interleave(self.group_size, dim=1)
        if self.permutation is None:
            return weight
        ordered = torch.empty_like(weight)
        ordered[:, self.permutation] = weight
        return ordered

    def _values(self) -> Tensor:
        if self.format is CodeFormat.MXFP4:
            return torch.tensor(E2M1_VALUES, device=self.codes.device)[self.codes.long()]
        values = self.codes.to(torch.float32)
        if self.format is CodeFormat.INT4 and self.zeros is None:
            return values - INT4_ZERO
        return values
