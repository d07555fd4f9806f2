"""Which tokens a drafter should expect of the target, given its own logits."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.sampler.noise import gumbel_noise, stream_keys
from engine.sequence import SequenceState
from protocol.sampling import SamplingParams

_NUM_CANDIDATES = 64
"""Tokens of a row that are looked at: the others together are hardly ever the one."""

_DISAGREEMENT = 0.5
"""How much the logits of drafter and target differ, as the scale of Gumbel noise: of 1/3 to 1 this brought
the most accepted tokens (bundled pair)."""

_MIN_TEMPERATURE = 1e-6


def rank_drafted(
    logits: Tensor, sequences: Sequence[SequenceState], depths: Sequence[Sequence[int]], *, with_noise: bool
) -> tuple[Tensor, Tensor]:
    """`rank`, where `logits` has a row for each of a sequence's depths: after so many drafted tokens."""
    after = [(sequence, depth) for sequence, its in zip(sequences, depths, strict=True) for depth in its]
    params = [sequence.params for sequence, _ in after]
    return rank(
        logits, params, [sequence.position + depth for sequence, depth in after], with_noise=with_noise
    )


def rank(
    logits: Tensor, params: Sequence[SamplingParams], positions: Sequence[int], *, with_noise: bool
) -> tuple[Tensor, Tensor]:
    """Log-probabilities (float32 [rows, n]) that tokens (int64 [rows, n]) are the target's at `positions`.

    `logits` [rows, vocab_size] are the drafter's; penalties and bans are left out. `with_noise`: the target
    draws with the noise of the position (coupled verification), so that it is known which tokens that
    favours. What it will take is then the greatest sum of its logits and noise, as it is for greedy rows
    without noise, and only the difference between the two models' logits is left to chance.
    """
    device = logits.device
    is_greedy = torch.tensor([[p.is_greedy] for p in params], device=device)
    temperature = [[1.0 if p.is_greedy else max(p.temperature, _MIN_TEMPERATURE)] for p in params]
    temperatures = torch.tensor(temperature, device=device)
    log_probs = (logits.float() / temperatures).log_softmax(1)
    scores, token_ids = log_probs.topk(min(_NUM_CANDIDATES, logits.shape[1]))
    if with_noise and not all(p.is_greedy for p in params):
        seeds = torch.tensor([p.seed for p in params], device=device)
        keys = stream_keys(seeds, torch.tensor(positions, device=device))
        noise = gumbel_noise(keys.unsqueeze(1), token_ids).masked_fill_(is_greedy, 0.0)
        scores = (scores + noise).masked_fill_(~_admitted(scores, params), -torch.inf)
    sharpness = torch.where(is_greedy | with_noise, temperatures / _DISAGREEMENT, 1.0)
    return (scores * sharpness).log_softmax(1), token_ids


def _admitted(values: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Bool [rows, n]: what top-k, top-p and min-p leave of log-probabilities in descending order."""
    num_tokens = values.shape[1]
    filters = [
        (num_tokens, 1.0, 0.0) if p.is_greedy else (p.top_k if p.top_k > 0 else num_tokens, p.top_p, p.min_p)
        for p in params
    ]
    top_k, top_p, min_p = torch.tensor(filters, device=values.device).T.unsqueeze(2)
    mass = values.exp()
    ranks = torch.arange(num_tokens, device=values.device)
    return (ranks < top_k) & (mass.cumsum(1) - mass < top_p) & (mass >= min_p * mass[:, :1])
