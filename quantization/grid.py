"""Grids of integer codes for groups of weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.quantization.weight import CodeFormat, QuantizedWeight

STORED_SCALES = torch.float16
"""The dtype of scales in AWQ and GPTQ checkpoints. Codes are chosen for scales that are rounded to it."""

_LEAST_SCALE = float(torch.finfo(STORED_SCALES).tiny)

_CLIPS = tuple(1 - step / 20 for step in range(11))


@dataclass(frozen=True)
class Grid:
    """The values `scales * (code - zeros)`, for codes from 0 to 2**bits - 1.

    `scales` and `zeros` are float32 and broadcast with the weights.
    """

    bits: int
    scales: Tensor
    zeros: Tensor

    def codes(self, weight: Tensor) -> Tensor:
        """Return the nearest codes: float32, in the weight's shape."""
        return (weight / self.scales + self.zeros).round().clamp(0, 2**self.bits - 1)

    def values(self, codes: Tensor) -> Tensor:
        return (codes - self.zeros) * self.scales

    def rounded(self, weight: Tensor) -> Tensor:
        return self.values(self.codes(weight))


def symmetric(weight: Tensor, bits: int, clip: float | Tensor = 1.0) -> Grid:
    """Return one symmetric grid for each row of the last dimension; the middle code is 0.

    The value farthest from 0, times `clip`, gets code 0, which has no opposite. Scales may be negative.
    """
    farthest = weight.gather(-1, weight.abs().argmax(-1, keepdim=True))
    middle = 2 ** (bits - 1)
    scales = _stored(farthest * clip / -middle)
    return Grid(bits, scales, torch.full_like(scales, middle))


def spanning(weight: Tensor, bits: int, clip: float | Tensor = 1.0) -> Grid:
    """Return one grid for each row of the last dimension. The grid spans the row's values and 0.

    Values beyond `clip` times the largest magnitude are cut off.
    """
    bound = weight.abs().amax(-1, keepdim=True) * clip
    highest = torch.minimum(weight.amax(-1, keepdim=True).clamp(min=0), bound)
    lowest = torch.maximum(weight.amin(-1, keepdim=True).clamp(max=0), -bound)
    scales = _stored((highest - lowest) / (2**bits - 1))
    return Grid(bits, scales, (-lowest / scales).round().clamp(0, 2**bits - 1))


def closest(
    weight: Tensor, bits: int, make: Callable[[Tensor, int, Tensor], Grid], error: Callable[[Tensor], Tensor]
) -> Grid:
    """Return the grids of `make` with the cheapest clip for each row of the last dimension.

    `error` gets rounded minus exact weights, [..., n], and returns their cost, [..., 1].
    """
    clips = torch.tensor(_CLIPS, device=weight.device)
    errors = [error(make(weight, bits, clip).rounded(weight) - weight) for clip in clips]
    return make(weight, bits, clips[torch.stack(errors).argmin(0)])


def in_groups(weight: Tensor, group_size: int) -> Tensor:
    """Return a view of [rows, columns] as [rows, groups, group_size]."""
    return weight.unflatten(-1, (-1, group_size))


def to_weight(codes: Tensor, grid: Grid, permutation: Tensor | None = None) -> QuantizedWeight:
    """Pack `codes`, float32 [out, in]; the grid's scales and zeros are [out, groups]."""
    middle = 2 ** (grid.bits - 1)
    is_symmetric = bool((grid.zeros == middle).all())
    if grid.bits == 8:
        return QuantizedWeight(
            CodeFormat.INT8, (codes - middle).to(torch.int8), grid.scales, None, permutation
        )
    zeros = None if is_symmetric else grid.zeros
    return QuantizedWeight(CodeFormat.INT4, codes.to(torch.uint8), grid.scales, zeros, permutation)


def _stored(scales: Tensor) -> Tensor:
    magnitudes = scales.abs().clamp(min=_LEAST_SCALE)
    return magnitudes.copysign(scales).to(STORED_SCALES).to(torch.float32)
