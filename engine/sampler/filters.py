"""Which tokens min-p, top-k and top-p leave.

Every filter is a threshold on a token's value, so that equal values share one fate and the outcome depends
neither on a sort's order nor on the other rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.sampler.batch import BatchParams
from engine.sampler.ops import at_least, sort_rows_descending, true_indices

_FIRST_SHARE = 2.0**-12
_SLACK = 1e-3


def survivors(values: Tensor, batch: BatchParams) -> tuple[Tensor, Tensor]:
    """Rows and token ids (int64 [k]) of the tokens that may be chosen in the filtered rows.

    `values` is float32 [n, vocab], log-probabilities up to a constant per row with each row's maximum at 0.
    min-p keeps values >= log(min_p); top-k what is no smaller than the k-th largest value; top-p, on what
    those left, a token while those of greater value have less than `top_p` of the probability together.
    """
    floor = batch.min_p_floor
    if batch.max_top_k:
        kth = values.topk(batch.max_top_k).values.gather(1, batch.top_k_index)
        floor = torch.maximum(floor, kth.masked_fill_(batch.no_top_k, -torch.inf))
    if len(batch.top_p_rows):
        floor = torch.maximum(floor, _nucleus_floor(values, floor, batch))
    return true_indices(at_least(values, torch.maximum(floor, batch.row_floor)))


def _nucleus_floor(values: Tensor, floor: Tensor, batch: BatchParams) -> Tensor:
    """float32 [n, 1]: the smallest value in each row's nucleus; -inf in rows without top-p."""
    rows = batch.top_p_rows
    if len(rows) < len(values):
        values, floor = values[rows], floor[rows]
    weights = values.exp()
    if batch.has_value_filter:
        weights.masked_fill_(at_least(values, floor).logical_not_(), 0.0)
    total = weights.sum(dim=1, keepdim=True, dtype=torch.float64)
    wanted = batch.top_p * total
    # Tokens each lighter than this weigh less than 1 - top_p together, so that the nucleus lies above.
    lightest = (total - wanted) / values.shape[1]
    for bound in (torch.maximum(total * _FIRST_SHARE, lightest), lightest):
        ordered = _ordered_above(values, torch.maximum(floor, (bound.log() - _SLACK).float()))
        mass = ordered.double().exp_()
        reached = mass.cumsum(dim=1)
        if (reached[:, -1:] >= wanted).all():
            break
    num_inside = (reached - mass < wanted).sum(dim=1, keepdim=True)
    smallest = ordered.gather(1, num_inside - 1)
    if len(rows) == len(batch.min_p_floor):
        return smallest
    return torch.full_like(batch.min_p_floor, -torch.inf).index_copy_(0, rows, smallest)


def _ordered_above(values: Tensor, floor: Tensor) -> Tensor:
    """Each row's values >= `floor` in descending order, padded with -inf to the longest row's number."""
    mask = at_least(values, floor)
    rows, columns = true_indices(mask)
    ends = mask.sum(dim=1).cumsum(0)
    starts = torch.nn.functional.pad(ends[:-1], (1, 0))
    slots = torch.arange(len(rows), device=values.device) - starts[rows]
    padded = torch.full((len(values), int(slots.max()) + 1), -torch.inf, device=values.device)
    padded[rows, slots] = values[rows, columns]
    return sort_rows_descending(padded)
