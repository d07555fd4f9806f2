"""AWQ: the scales of input channels, and the ranges of groups, with which rounding does least to the outputs.

Lin et al., "AWQ: Activation-aware Weight Quantization for LLM Compression and Acceleration" (2023). Scales
are the inputs' mean magnitude to a power, searched on a grid (section 3.2); then each group's range is
searched. Errors are those of the layers' outputs over all calibration tokens, by the inputs' second moments.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.quantization.weight import QuantizedWeight
from quantization import grid

_ALPHAS = tuple(step / 20 for step in range(20))
_LEAST_INPUT = 1e-4
_ROWS_AT_ONCE = 512


def search_scales(
    weights: Sequence[Tensor], moments: Tensor, inputs: Tensor, index: Tensor, bits: int, group_size: int
) -> Tensor:
    """The scales, float32 [n]; input channel c of the layers gets those of `index[c]`.

    `weights` float32 [out, in] are layers with the same inputs; `moments` [in, in] the sum of x x^T; `inputs`
    [n] the mean of |x|, or a multiple of it, of the channels that share a scale.
    """

    def error(scales: Tensor) -> float:
        return sum(_scaled_error(weight, moments, scales[index], bits, group_size) for weight in weights)

    candidates = [_candidate(inputs, alpha) for alpha in _ALPHAS]
    return min(candidates, key=error)


def _candidate(inputs: Tensor, alpha: float) -> Tensor:
    scales = inputs.clamp(min=_LEAST_INPUT).pow(alpha)
    return scales / (scales.amax() * scales.amin()).sqrt()


def _scaled_error(weight: Tensor, moments: Tensor, scales: Tensor, bits: int, group_size: int) -> float:
    groups = grid.in_groups(weight * scales, group_size)
    rounded = grid.spanning(groups, bits).rounded(groups).flatten(1) / scales
    return output_error(rounded - weight, moments)


def output_error(difference: Tensor, moments: Tensor) -> float:
    """What a difference of weights [out, in] changes in the outputs: squares, summed over tokens."""
    return float(((difference @ moments) * difference).sum())


def quantize(weight: Tensor, moments: Tensor, bits: int, group_size: int) -> QuantizedWeight:
    """Round to the grids whose clipping does least to each group's part of the outputs."""
    groups = grid.in_groups(weight, group_size)
    within = _diagonal_blocks(moments, group_size)

    def error(difference: Tensor) -> Tensor:
        return (torch.einsum("rgi,gij->rgj", difference, within) * difference).sum(-1, keepdim=True)

    made = [grid.closest(rows, bits, grid.spanning, error) for rows in groups.split(_ROWS_AT_ONCE)]
    scales, zeros = (torch.cat([getattr(each, part) for each in made]) for part in ("scales", "zeros"))
    codes = grid.Grid(bits, scales, zeros).codes(groups)
    return grid.to_weight(codes.flatten(1), grid.Grid(bits, scales.squeeze(-1), zeros.squeeze(-1)))


def _diagonal_blocks(moments: Tensor, group_size: int) -> Tensor:
    """[groups, group_size, group_size]."""
    count = len(moments) // group_size
    blocks = moments.view(count, group_size, count, group_size)
    return blocks.diagonal(dim1=0, dim2=2).movedim(-1, 0).contiguous()
