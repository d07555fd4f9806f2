"""Which tokens min-p, top-k and top-p leave.

Every filter is a threshold on a token's value, so that equal values share one fate and the outcome depends
neither on a sort's order nor on the other rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.sampler.batch import Distribution

_SLACK = 1e-3


def apply_filters(values: Tensor, params: Distribution) -> None:
    """Edit float32 [n, vocab] in place: what the filters exclude gets -inf.

    `values` are log-probabilities up to a constant per row, each row's maximum at 0. min-p keeps values >=
    log(min_p); top-k what is no smaller than the k-th largest value; top-p, of what those left, a token while
    those of greater value have less than `top_p` of the probability together.
    """
    if not params.has_filters:
        return
    floor = params.min_p_floor
    if params.max_top_k:
        kth = values.topk(params.max_top_k).values.gather(1, params.top_k_index)
        floor = torch.maximum(floor, kth.masked_fill_(params.no_top_k, -torch.inf))
    values.masked_fill_(values < floor, -torch.inf)
    rows = params.top_p_rows
    if len(rows):
        some = values[rows]
        values[rows] = some.masked_fill_(some < _nucleus_floor(some, params.top_p), -torch.inf)


def _nucleus_floor(values: Tensor, top_p: Tensor) -> Tensor:
    """float32 [n, 1]: the smallest value in each row's nucleus."""
    total = values.double().exp_().sum(dim=1, keepdim=True)
    wanted = top_p * total
    # Tokens each lighter than this weigh less than 1 - top_p together, so that the nucleus lies above.
    lightest = (((total - wanted) / values.shape[1]).log() - _SLACK).float()
    ordered = values.topk(int((values >= lightest).sum(dim=1).max())).values
    mass = ordered.double().exp_()
    num_inside = (mass.cumsum(dim=1) - mass < wanted).sum(dim=1, keepdim=True)
    return ordered.gather(1, num_inside - 1)
