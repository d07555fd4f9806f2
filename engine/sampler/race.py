"""Gumbel-max sampling that skips hopeless tokens.

The logarithms behind Gumbel noise are expensive for a whole vocabulary. A token can only win if it beats the
likeliest token's score, and the random bits behind its noise give a cheap bound that rules most tokens out.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from engine.sampler.noise import gumbel_noise, noise_bits, tail_probability

_SLACK = 1e-4
_TAIL_SLACK = 2.0**-22
_NO_CHANCE = 1e-30
"""Smaller shares of the greatest weight count as this: no noise lifts them, and log(0) is slow on a CPU."""
_NEGLIGIBLE = -60.0
"""Smaller exponents count as this: a CPU takes thirty times longer where the result is denormal."""
_CPU_CHUNK = 2**16
_DEVICE_CHUNK = 2**24


def race(values: Tensor, keys: Tensor) -> Tensor:
    """int64 [n]: the token of each row with the greatest value + noise, the lowest id among equals.

    `values` is float32 [n, vocab] with each row's maximum at 0, `keys` int64 [n].
    """
    rows, token_ids = _challengers(values, keys.unsqueeze(1))
    scores = torch.full_like(values, -torch.inf)
    scores[rows, token_ids] = values[rows, token_ids] + gumbel_noise(keys[rows], token_ids)
    return scores.argmax(dim=1)


def draw(weights: Tensor, keys: Tensor) -> Tensor:
    """int64 [n]: from each row of float32 [n, vocab] a token with a chance in proportion to its weight."""
    values = weights / weights.amax(dim=1, keepdim=True)
    return race(values.clamp_min_(_NO_CHANCE).log_(), keys)


def _challengers(values: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
    """Rows and token ids (int64 [k]) of all tokens that may win, and few others.

    With uniform u behind the noise, value + noise >= s means -log u <= exp(value - s), and -log u is at least
    1 - u.
    """
    score_to_beat = gumbel_noise(keys, values.argmax(dim=1, keepdim=True)) - _SLACK
    found = []
    for start, chunk in _column_chunks(values):
        token_ids = torch.arange(start, start + chunk.shape[1], device=values.device)
        tail = tail_probability(noise_bits(keys, token_ids)).sub_(_TAIL_SLACK)
        chances = (chunk - score_to_beat).clamp_min_(_NEGLIGIBLE).exp_()
        rows, columns = (chances >= tail).nonzero(as_tuple=True)
        found.append((rows, columns + start))
    return torch.cat([rows for rows, _ in found]), torch.cat([ids for _, ids in found])


def _column_chunks(values: Tensor) -> Iterator[tuple[int, Tensor]]:
    """First column and view of pieces of [n, m] small enough that what is made of them stays in the cache."""
    limit = _CPU_CHUNK if values.device.type == "cpu" else _DEVICE_CHUNK
    size = max(1, limit // len(values))
    for start in range(0, values.shape[1], size):
        yield start, values[:, start : start + size]
