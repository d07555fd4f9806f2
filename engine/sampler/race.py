"""Gumbel-max sampling: the greatest log-probability + noise wins."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.sampler.noise import gumbel_noise

_NO_CHANCE = 1e-30
"""Smaller shares of the greatest weight count as this: no noise lifts them, and log(0) is slow on a CPU."""


def race(values: Tensor, keys: Tensor) -> Tensor:
    """int64 [n]: the token of each row with the greatest value + noise, the lowest id among equals.

    `values` is float32 [n, vocab] with each row's maximum at 0, `keys` int64 [n].
    """
    token_ids = torch.arange(values.shape[1], device=values.device)
    return (values + gumbel_noise(keys.unsqueeze(1), token_ids)).argmax(dim=1)


def draw(weights: Tensor, keys: Tensor) -> Tensor:
    """int64 [n]: from each row of float32 [n, vocab] a token with a chance in proportion to its weight."""
    values = weights / weights.amax(dim=1, keepdim=True)
    return race(values.clamp_min_(_NO_CHANCE).log_(), keys)
