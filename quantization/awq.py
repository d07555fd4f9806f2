"""AWQ: a search for the input channel scales and the clipping ranges that change a layer's outputs least.

Lin et al., "AWQ: Activation-aware Weight Quantization for LLM Compression and Acceleration" (2023). The
scales are powers of the inputs' mean magnitudes; the exponent is searched on a grid (section 3.2). Then each
group's range is searched. The error is the squared change of the layer's outputs over all calibration tokens,
computed from the inputs' second moments.
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
    """Return the scales, float32 [n]; input channel c of the layers has the scale `index[c]`.

    `weights`, each float32 [out, in], belong to layers with the same inputs. `moments` [in, in] is the sum of
    x x^T. `inputs` [n] is the mean of |x|, or a multiple of it, over the channels that share a scale.
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
    """Return the squared change of the outputs, over all tokens, by a `difference` [out, in] of weights."""
    return float(((difference @ moments) * difference).sum())


def quantize(weight: Tensor, moments: Tensor, bits: int, group_size: int) -> QuantizedWeight:
    """Round each group to a grid, clipped so that the group's share of the outputs changes least."""
    groups = grid.in_groups(weight, group_size)
    within = _diagonal_blocks(moments, group_size)

    def error(difference: Tensor) -> Tensor:
        return (torch.einsum("rgi,gij->rgj", difference, within) * difference).sum(-1, keepdim=True)

    made = [grid.closest(rows, bits, grid.spanning, error) for rows in groups.split(_ROWS_AT_ONCE)]
    scales, zeros = (torch.cat([getattr(each, part) for each in made]) for part in ("scales", "zeros"))
    codes = grid.Grid(bits, scales, zeros).codes(groups)
    return grid.to_weight(codes.flatten(1), grid.Grid(bits, scales.squeeze(-1), zeros.squeeze(-1)))


def _diagonal_blocks(moments: Tensor, group_size: int) -> Tensor:
    """Return the blocks on the diagonal: [groups, group_size, group_size]."""
    count = len(moments) // group_size
    blocks = moments.view(count, group_size, count, group_size)
    return blocks.diagonal(dim1=0, dim2=2).movedim(-1, 0).contiguous()
