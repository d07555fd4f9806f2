"""Which tokens min-p, top-k and top-p leave.

Every filter is a threshold on a token's value, so that equal values share one fate and the outcome depends
neither on a sort's order nor on the other rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.sampler.batch import BatchParams
from engine.sampler.ops import at_least, column_chunks, exp_, sort_rows_descending, true_indices

_FIRST_SHARE = 2.0**-14
_SLACK = 1e-3


def survivors(values: Tensor, batch: BatchParams) -> tuple[Tensor, Tensor]:
    """Rows and token ids (int64 [k]) of the tokens that may be chosen in the filtered rows.

    `values` are as for `floors`.
    """
    return true_indices(at_least(values, torch.maximum(floors(values, batch), batch.row_floor)))


def floors(values: Tensor, batch: BatchParams) -> Tensor:
    """float32 [n, 1]: the least value that each row's filters leave.

    `values` is float32 [n, vocab], log-probabilities up to a constant per row with each row's maximum at 0.
    min-p keeps values >= log(min_p); top-k what is no smaller than the k-th largest value; top-p, on what
    those left, a token while those of greater value have less than `top_p` of the probability together.
    """
    floor = batch.min_p_floor
    if batch.max_top_k:
        kth = values.topk(batch.max_top_k).values.gather(1, batch.top_k_index)
        floor = torch.maximum(floor, kth.masked_fill_(batch.no_top_k, -torch.inf))
    rows = batch.top_p_rows
    if len(rows) == len(values):
        floor = _nucleus_floor(values, floor, batch)
    elif len(rows):
        floor = floor.index_copy(0, rows, _nucleus_floor(values[rows], floor[rows], batch))
    return floor


def _nucleus_floor(values: Tensor, floor: Tensor, batch: BatchParams) -> Tensor:
    """float32 [n, 1]: the smallest value in each row's nucleus among values >= `floor`, for top-p rows."""
    if batch.top_k_in_top_p_rows:
        ordered = _ordered_above(values, floor)
        return _smallest_inside(ordered, batch.top_p * _mass(ordered).sum(dim=1, keepdim=True))
    total = _total_mass(values, floor, batch.has_value_filter)
    wanted = batch.top_p * total
    # Tokens each lighter than this weigh less than 1 - top_p together, so that the nucleus lies above.
    lightest = (total - wanted) / values.shape[1]
    for bound in (torch.maximum(total * _FIRST_SHARE, lightest), lightest):
        ordered = _ordered_above(values, torch.maximum(floor, (bound.log() - _SLACK).float()))
        if (_mass(ordered).sum(dim=1, keepdim=True) >= wanted).all():
            break
    return _smallest_inside(ordered, wanted)


def _total_mass(values: Tensor, floor: Tensor, has_value_filter: bool) -> Tensor:
    """float64 [n, 1]: sum of exp(value) over the values >= `floor`."""
    total = torch.zeros(len(values), 1, dtype=torch.float64, device=values.device)
    for _, chunk in column_chunks(values):
        weights = exp_(chunk.clone())
        if has_value_filter:
            weights.masked_fill_(chunk < floor, 0.0)
        total += weights.sum(dim=1, keepdim=True, dtype=torch.float64)
    return total


def _ordered_above(values: Tensor, floor: Tensor) -> Tensor:
    """Each row's values >= `floor` in descending order, padded with -inf to the longest row's number."""
    rows, columns = true_indices(at_least(values, floor))
    counts = torch.bincount(rows, minlength=len(values))
    slots = torch.arange(len(rows), device=values.device) - (counts.cumsum(0) - counts)[rows]
    padded = torch.full((len(values), int(counts.max())), -torch.inf, device=values.device)
    padded[rows, slots] = values[rows, columns]
    return sort_rows_descending(padded)


def _mass(ordered: Tensor) -> Tensor:
    return ordered.double().exp_()


def _smallest_inside(ordered: Tensor, wanted: Tensor) -> Tensor:
    """The last value of each row before which there is less mass than `wanted`."""
    mass = _mass(ordered)
    num_inside = (mass.cumsum(dim=1) - mass < wanted).sum(dim=1, keepdim=True)
    return ordered.gather(1, num_inside - 1)
