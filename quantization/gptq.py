"""GPTQ: column-by-column rounding of a layer's weights; later columns compensate for the error.

Frantar et al., "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained Transformers" (2022),
algorithm 1. A block of the paper's lazy updates is a group here, so a group's grid is chosen after the
updates by all earlier groups. The grid is clipped so that the outputs change least by the algorithm's own
measure: a column's squared error over the square of its diagonal entry.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.quantization.weight import QuantizedWeight
from quantization import grid

DAMPING = 0.01
"""Damping of the Hessian's diagonal, as a share of the diagonal's mean."""


def quantize(
    weight: Tensor, hessian: Tensor, bits: int, group_size: int, desc_act: bool = False
) -> QuantizedWeight:
    """Quantize `weight`, float32 [out, in]. `hessian`, float32 [in, in], is the sum of x x^T over the layer's
    inputs.

    With `desc_act` the columns with the largest inputs come first, and groups follow this order.
    """
    permutation = hessian.diagonal().argsort(descending=True, stable=True) if desc_act else None
    if permutation is not None:
        weight, hessian = weight[:, permutation], hessian[permutation][:, permutation]
    factor = _factor(hessian)
    left = weight.clone()
    codes = torch.empty_like(left)
    grids = []
    for start in range(0, weight.shape[1], group_size):
        end = start + group_size
        columns = left[:, start:end]
        grids.append(_find_grid(columns, bits, factor.diagonal()[start:end]))
        codes[:, start:end], errors = _round_group(columns, grids[-1], factor[start:end, start:end])
        left[:, end:] -= errors @ factor[start:end, end:]
    whole = grid.Grid(
        bits, torch.cat([each.scales for each in grids], 1), torch.cat([each.zeros for each in grids], 1)
    )
    return grid.to_weight(codes, whole, permutation)


def _factor(hessian: Tensor) -> Tensor:
    """Return the upper triangular U with U^T U equal to the inverse of the damped Hessian."""
    scale = hessian.diagonal().mean()
    damping = DAMPING * scale if scale > 0 else torch.ones_like(scale)
    identity = torch.eye(len(hessian), device=hessian.device)
    # The Cholesky factor of the reversed Hessian is the inverse of the factor that we need: one inversion
    # suffices.
    lower = torch.linalg.cholesky((hessian + damping * identity).flip(0, 1))
    return torch.linalg.solve_triangular(lower, identity, upper=False).flip(0, 1)


def _find_grid(columns: Tensor, bits: int, diagonal: Tensor) -> grid.Grid:
    def error(difference: Tensor) -> Tensor:
        return (difference / diagonal).square().sum(-1, keepdim=True)

    return grid.closest(columns, bits, grid.symmetric, error)


def _round_group(columns: Tensor, group: grid.Grid, factor: Tensor) -> tuple[Tensor, Tensor]:
    """Return the codes, and each column's error divided by its diagonal entry; both are [out, group]."""
    columns = columns.clone()
    codes, errors = torch.empty_like(columns), torch.empty_like(columns)
    for place in range(columns.shape[1]):
        column = columns[:, place : place + 1]
        codes[:, place : place + 1] = group.codes(column)
        error = (column - group.rounded(column)) / factor[place, place]
        columns[:, place + 1 :] -= error @ factor[place : place + 1, place + 1 :]
        errors[:, place : place + 1] = error
    return codes, errors
