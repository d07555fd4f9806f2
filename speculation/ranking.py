"""Which tokens a drafter should expect of the target, given its own logits."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from engine.copies import Upload
from engine.sampler.noise import gumbel_noise, stream_keys
from protocol.sampling import SamplingParams

_NUM_CANDIDATES = 64
"""Tokens of a row that are looked at: the others together are hardly ever the one."""

_DISAGREEMENT = 0.5
"""How much the logits of drafter and target differ, as the scale of Gumbel noise: of 1/3 to 1 this brought
the most accepted tokens (bundled pair)."""

NEAR = math.log(0.3)
"""Paths of a tree this much less likely than their level's likeliest are not followed: of 0.02 to 0.6 times
as likely, this brought the most accepted tokens (bundled pair, 8 to 24 nodes)."""

_MIN_TEMPERATURE = 1e-6


def rank(
    logits: Tensor,
    params: Sequence[SamplingParams],
    positions: Sequence[int],
    upload: Upload,
    *,
    with_noise: bool,
) -> tuple[Tensor, Tensor]:
    """Log-probabilities (float32 [rows, n]) that tokens (int64 [rows, n]) are the target's at `positions`.

    `logits` [rows, vocab_size] are the drafter's; penalties and bans are left out. `with_noise`: the target
    draws with the noise of the position (coupled verification), so that it is known which tokens that
    favours. What it will take is then the greatest sum of its logits and noise, as it is for greedy rows
    without noise, and only the difference between the two models' logits is left to chance. `upload` is to
    the logits' device, for which the host does not wait.
    """
    num_tokens = min(_NUM_CANDIDATES, logits.shape[1])
    is_greedy, seeds, places, options = upload(
        [
            np.array([[p.is_greedy] for p in params]),
            np.array([p.seed for p in params], np.int64),
            np.array(positions, np.int64),
            np.array([_options(p, num_tokens) for p in params], np.float32),
        ]
    )
    temperatures, *filters = options.T.unsqueeze(2)
    log_probs = (logits.float() / temperatures).log_softmax(1)
    scores, token_ids = log_probs.topk(num_tokens)
    if with_noise and not all(p.is_greedy for p in params):
        keys = stream_keys(seeds, places)
        noise = gumbel_noise(keys.unsqueeze(1), token_ids).masked_fill_(is_greedy, 0.0)
        scores = (scores + noise).masked_fill_(~_admitted(scores, *filters), -torch.inf)
    sharpness = torch.where(is_greedy | with_noise, temperatures / _DISAGREEMENT, 1.0)
    return (scores * sharpness).log_softmax(1), token_ids


def best_of(scores: Tensor, token_ids: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Each row's `count` likeliest tokens with their scores, the likeliest first."""
    best = scores.topk(min(count, scores.shape[1]))
    return best.values, token_ids.gather(1, best.indices)


def _options(params: SamplingParams, num_tokens: int) -> tuple[float, int, float, float]:
    """Temperature, top-k, top-p and min-p, as they bear on `num_tokens` candidates."""
    if params.is_greedy:
        return 1.0, num_tokens, 1.0, 0.0
    top_k = params.top_k if params.top_k > 0 else num_tokens
    return max(params.temperature, _MIN_TEMPERATURE), top_k, params.top_p, params.min_p


def _admitted(values: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """Bool [rows, n]: what the filters [rows, 1] leave of log-probabilities in descending order."""
    mass = values.exp()
    ranks = torch.arange(values.shape[1], device=values.device)
    return (ranks < top_k) & (mass.cumsum(1) - mass < top_p) & (mass >= min_p * mass[:, :1])
