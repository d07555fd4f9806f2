"""Drawing from whole rows without noise for whole rows.

Noise for a whole vocabulary is dear, but the winner must at least beat the likeliest token's score, and the
bits behind the noise tell cheaply who cannot.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.sampler.noise import gumbel_noise, noise_bits, tail_probability
from engine.sampler.ops import argmax_rows, at_least, column_chunks, exp_, true_indices

_SLACK = 1e-4
_TAIL_SLACK = 2.0**-22
_NO_CHANCE = 1e-30
"""Of the greatest weight: no noise lifts a token so far, and a CPU is slow with the logarithm of 0."""


def challengers(values: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
    """Rows and token ids (int64 [k]) of all that may have the greatest value + noise, and few others.

    `values` is float32 [n, vocab] with each row's maximum at 0, `keys` int64 [n]. With uniform u behind the
    noise, value + noise >= s means -log u <= exp(value - s), and -log u is at least 1 - u.
    """
    keys = keys.unsqueeze(1)
    score_to_beat = gumbel_noise(keys, argmax_rows(values).unsqueeze(1)) - _SLACK
    found = []
    for start, chunk in column_chunks(values):
        token_ids = torch.arange(start, start + chunk.shape[1], device=values.device)
        tail = tail_probability(noise_bits(keys, token_ids)).sub_(_TAIL_SLACK)
        rows, columns = true_indices(at_least(exp_(chunk - score_to_beat), tail))
        found.append((rows, columns + start))
    return torch.cat([rows for rows, _ in found]), torch.cat([ids for _, ids in found])


def draw(weights: Tensor, keys: Tensor) -> Tensor:
    """int64 [n]: from each row of float32 [n, vocab] a token with a chance in proportion to its weight."""
    values = weights / weights.amax(dim=1, keepdim=True)
    values.clamp_min_(_NO_CHANCE).log_()
    rows, token_ids = challengers(values, keys)
    return best_candidates(values, rows, token_ids, gumbel_noise(keys[rows], token_ids))


def best_candidates(values: Tensor, rows: Tensor, token_ids: Tensor, noise: Tensor) -> Tensor:
    """int64 [n]: the candidate (rows, token_ids) of each row with the greatest value + noise.

    Overwrites `values`.
    """
    scores = values[rows, token_ids] + noise
    values.fill_(-torch.inf)
    values[rows, token_ids] = scores
    return argmax_rows(values)
