"""Sampling with torch's operators: for any device, and the reference for the other samplers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from engine.sampler.edits import apply_edits
from engine.sampler.noise import NOISE_SPAN, Purpose, gumbel_noise, round_keys, stream_keys
from engine.sampler.rows import Batch, TokenChoice

_SLACK = 1e-3
_NO_CHANCE = 1e-30
"""Least share of the greatest weight that `draw` uses: no noise lifts it, and log(0) is slow on a CPU."""


class TorchSampler:
    on_device = False

    def begin(self, batch: Batch) -> TokenChoice:
        values, failed = _values(batch)
        failed_rows = failed.nonzero()[:, 0].tolist()
        chosen = values.argmax(dim=1)
        greedy = _column(batch, batch.requests.greedy)[:, 0]
        if not batch.requests.greedy.all():
            apply_filters(values, batch)
            keys = stream_keys(_tensor(batch, batch.seeds), _tensor(batch, batch.positions))
            chosen = torch.where(greedy, chosen, race(values, keys))
        return TokenChoice.made(chosen, failed_rows)

    def probabilities(self, batch: Batch) -> Tensor:
        values, failed = _values(batch)
        likeliest = values.argmax(dim=1, keepdim=True)
        apply_filters(values, batch)
        shares = values.masked_fill_(values < -NOISE_SPAN, -torch.inf).softmax(dim=1)
        certain = torch.zeros_like(shares).scatter_(1, likeliest, 1.0)
        shares = torch.where(_column(batch, batch.requests.greedy), certain, shares)
        return shares.masked_fill_(failed, 0.0)

    def draw_drafts(self, batch: Batch, starts: Sequence[int]) -> tuple[Tensor, Tensor]:
        probabilities, seeds = self.probabilities(batch), _tensor(batch, batch.seeds)
        places = _tensor(batch, [*starts]), _tensor(batch, batch.positions)
        return draw(probabilities, round_keys(seeds, *places, Purpose.DRAFT)), probabilities


def _values(batch: Batch) -> tuple[Tensor, Tensor]:
    """Return float32 [n, vocab], log-probabilities up to a constant per row, each row's maximum at 0; and
    bool [n, 1], the rows that fail, whose values are zeros.
    """
    logits = batch.logits
    values = torch.empty(logits.shape, dtype=torch.float32, device=logits.device).copy_(logits)
    if batch.edits is not None:
        apply_edits(values, batch.edits)
    best = values.amax(dim=1, keepdim=True)
    failed = ~best.isfinite()
    requests = batch.requests
    values.sub_(best).div_(_column(batch, np.where(requests.greedy, 1.0, requests.table["temperature"])))
    return values.masked_fill_(failed, 0.0), failed


def apply_filters(values: Tensor, batch: Batch) -> None:
    """Edit float32 [n, vocab] in place: tokens that the filters exclude get -inf.

    `values` are log-probabilities up to a constant per row, each row's maximum at 0. min-p keeps values >=
    log(min_p). top-k keeps values >= the k-th largest. Of the remaining tokens, top-p keeps each one for
    which all tokens of greater value together have less than `top_p` of the probability. Each filter is a
    threshold on a token's value. So equal values are all kept or all excluded, and the result depends neither
    on a sort's order nor on other rows. Greedy rows are not filtered.
    """
    rows = batch.requests.table[np.array(batch.index)]
    floor = _tensor(batch, np.where(rows["temperature"] == 0, -np.inf, rows["min_p_floor"])[:, None]).float()
    top_k = rows["top_k"]
    if top_k.any():
        last = _tensor(batch, np.maximum(top_k - 1, 0)[:, None])
        kth = values.topk(int(top_k.max())).values.gather(1, last)
        floor = torch.maximum(floor, kth.masked_fill_(_tensor(batch, top_k == 0)[:, None], -torch.inf))
    values.masked_fill_(values < floor, -torch.inf)
    nuclei = np.flatnonzero((rows["top_p"] < 1) & (rows["temperature"] > 0))
    if len(nuclei):
        some = values[nuclei]
        top_p = _tensor(batch, rows["top_p"][nuclei, None])
        values[nuclei] = some.masked_fill_(some < _nucleus_floor(some, top_p), -torch.inf)


def _nucleus_floor(values: Tensor, top_p: Tensor) -> Tensor:
    """Return float32 [n, 1], the smallest value in each row's nucleus (the tokens that top-p keeps)."""
    total = values.double().exp_().sum(dim=1, keepdim=True)
    wanted = top_p * total
    # All tokens lighter than this together weigh less than 1 - top_p, so the nucleus is above it.
    lightest = (((total - wanted) / values.shape[1]).log() - _SLACK).float()
    ordered = values.topk(int((values >= lightest).sum(dim=1).max())).values
    mass = ordered.double().exp_()
    num_inside = (mass.cumsum(dim=1) - mass < wanted).sum(dim=1, keepdim=True)
    return ordered.gather(1, num_inside - 1)


def race(values: Tensor, keys: Tensor) -> Tensor:
    """Return int64 [n], each row's token with the greatest value + noise (Gumbel-max sampling), the lowest id
    among equals. `values` is float32 [n, vocab] with each row's maximum at 0, `keys` int64 [n].
    """
    token_ids = torch.arange(values.shape[1], device=values.device)
    return (values + gumbel_noise(keys.unsqueeze(1), token_ids)).argmax(dim=1)


def draw(weights: Tensor, keys: Tensor) -> Tensor:
    """Draw a token from each row of float32 [n, vocab] in proportion to its weight; return int64 [n]."""
    values = weights / weights.amax(dim=1, keepdim=True)
    return race(values.clamp_min_(_NO_CHANCE).log_(), keys)


def _tensor(batch: Batch, values: np.ndarray | list[int]) -> Tensor:
    return torch.as_tensor(values).to(batch.logits.device)


def _column(batch: Batch, values: np.ndarray) -> Tensor:
    """Return [n, 1], the values of the rows' requests."""
    return _tensor(batch, values[np.array(batch.index), None])
