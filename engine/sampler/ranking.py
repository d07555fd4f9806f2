"""A row's likeliest choices, best first, for drafters that may propose several tokens for one place."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.sampler.batch import BatchParams
from engine.sampler.noise import gumbel_noise

LOOKED_AT = 128


def rank(values: Tensor, keys: Tensor, batch: BatchParams, count: int) -> Tensor:
    """int64 [n, count]: of each row's likeliest tokens those with the greatest value + noise.

    `values` is float32 [n, vocab] at the rows' temperatures with each row's maximum at 0, `keys` int64 [n].
    The filters are those of `filters.survivors`, but top-p weighs what top-k and min-p drop.
    """
    top, token_ids = values.topk(min(max(count, LOOKED_AT), values.shape[1]))
    numbers = torch.arange(top.shape[1], device=values.device)
    kept = (top >= batch.min_p_floor) & ((numbers <= batch.top_k_index) | batch.no_top_k)
    if len(batch.top_p_rows):
        mass = top[batch.top_p_rows].exp()
        total = values[batch.top_p_rows].exp().sum(dim=1, keepdim=True)
        kept[batch.top_p_rows] &= (mass.cumsum(dim=1) - mass) < batch.top_p * total
    noise = gumbel_noise(keys.unsqueeze(1), token_ids) * batch.noise_scale.unsqueeze(1)
    scores = (top + noise).masked_fill_(~kept, -torch.inf)
    return token_ids.gather(1, scores.topk(count).indices)
