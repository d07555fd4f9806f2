"""Gumbel-max sampling that skips hopeless tokens.

The logarithms behind Gumbel noise are expensive for a whole vocabulary. A token can only win if it beats the
likeliest token's score, and the random bits behind its noise give a cheap bound that rules most tokens out.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.sampler.noise import gumbel_noise, noise_bits, tail_probability
from engine.sampler.ops import argmax_rows, at_least, column_chunks, exp_, true_indices

_SLACK = 1e-4
_TAIL_SLACK = 2.0**-22
_NO_CHANCE = 1e-30
"""Smaller shares of the greatest weight count as this: no noise lifts them, and log(0) is slow on a CPU."""


def challengers(values: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
    """Rows and token ids (int64 [k]) of all tokens that may have the greatest value + noise, and few others.

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
