"""Which tokens may still win: min-p, top-k, top-p, and what no noise could lift to the top.

Every filter is a threshold on a token's value, so that equal values share one fate and the outcome depends
neither on a sort's order nor on the other rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.sampler.batch import BatchParams
from engine.sampler.ops import indices_at_least, sort_rows_descending

_SLACK = 1e-3


def survivors(values: Tensor, batch: BatchParams) -> tuple[Tensor, Tensor]:
    """Flat indices of the tokens that may be chosen, ascending, and the row of each (both int64 [k]).

    `values` is float32 [n, vocab], log-probabilities up to a constant per row with each row's maximum at 0.
    top-k keeps what is no smaller than the k-th largest value. top-p, on what min-p and top-k left, keeps a
    token while those of greater value have less than `top_p` of the probability together.
    """
    floor = batch.min_p_floor
    if batch.max_top_k:
        kth = values.topk(batch.max_top_k).values.gather(1, batch.top_k_index)
        floor = torch.maximum(floor, kth.masked_fill_(batch.no_top_k, -torch.inf))
    if not len(batch.top_p_rows):
        kept = indices_at_least(values, torch.maximum(floor, batch.noise_floor))
        return kept, _rows_of(_row_starts(kept, values))

    weights = values.exp()
    if batch.has_value_filter:
        weights.masked_fill_(values < floor, 0.0)
    total = weights.sum(dim=1, keepdim=True, dtype=torch.float64)
    # Tokens each lighter than this weigh less than 1 - top_p together, so the nucleus lies above.
    lightest = (1.0 - batch.top_p) * total / values.shape[1]
    nucleus_floor = (lightest.log() - _SLACK).float()
    kept = indices_at_least(values, torch.maximum(torch.maximum(floor, batch.noise_floor), nucleus_floor))
    starts = _row_starts(kept, values)
    rows = _rows_of(starts)
    kept_values = values.view(-1).index_select(0, kept)
    cut = _nucleus_cut(kept_values, starts, batch, total)
    inside = kept_values >= cut.index_select(0, rows)
    return kept[inside], rows[inside]


def _nucleus_cut(kept_values: Tensor, starts: Tensor, batch: BatchParams, total: Tensor) -> Tensor:
    """float32 [n]: the smallest value in each row's nucleus; -inf in rows without top-p."""
    chosen = batch.top_p_rows
    first = starts[:-1].index_select(0, chosen).unsqueeze(1)
    counts = starts[1:].index_select(0, chosen).unsqueeze(1) - first
    columns = torch.arange(int(counts.max()), device=kept_values.device)
    padding = columns >= counts
    entries = (first + columns).clamp_max_(len(kept_values) - 1)
    ordered = sort_rows_descending(kept_values[entries].masked_fill_(padding, -torch.inf))
    mass = ordered.double().exp_()
    mass_before = mass.cumsum(dim=1) - mass
    wanted = batch.top_p.index_select(0, chosen) * total.index_select(0, chosen)
    num_inside = (mass_before < wanted).sum(dim=1, keepdim=True)
    cut = torch.full((len(starts) - 1,), -torch.inf, device=kept_values.device)
    cut[chosen] = ordered.gather(1, num_inside - 1).squeeze(1)
    return cut


def _row_starts(flat: Tensor, values: Tensor) -> Tensor:
    """int64 [n + 1]: where each row of `values` begins in the ascending flat indices."""
    num_rows, width = values.shape
    return torch.searchsorted(flat, torch.arange(num_rows + 1, device=flat.device) * width)


def _rows_of(starts: Tensor) -> Tensor:
    return torch.repeat_interleave(starts.diff())
