"""Measures a trained head: how often the target itself would say the drafted tokens.

It is measured at every place of the target's own greedy continuations of held-out text: these are the
sequences in which greedy verification takes place.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from training.heads.contract import Target, TrainableHead
from training.heads.learner import hidden_states

_WINDOWS_AT_ONCE = 16


@dataclass(frozen=True)
class Continuations:
    """`token_ids` [windows, length]: the first `prompt_length` are text, the rest are the target's."""

    token_ids: Tensor
    prompt_length: int


def continue_greedily(target: Target, prompts: Tensor, num_tokens: int) -> Continuations:
    """Continue `prompts` [windows, prompt length], int64, on any device."""
    continued = [
        target.model.generate(
            input_ids=some,
            attention_mask=torch.ones_like(some),
            max_new_tokens=num_tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        for some in prompts.to(target.device).split(_WINDOWS_AT_ONCE)
    ]
    return Continuations(torch.cat(continued), prompts.shape[1])


@torch.no_grad()
def acceptance(head: TrainableHead, target: Target, held_out: Continuations) -> list[float]:
    """Return, for each position of a greedy chain, how often the target agrees with it and with all
    positions before it.

    The same windows calibrate the head.
    """
    length = held_out.token_ids.shape[1]
    first, last = held_out.prompt_length - 1, length - 2 - head.depth
    places = torch.arange(first, last + 1, device=target.device)
    ahead = places.unsqueeze(1) + 2 + torch.arange(head.depth, device=target.device)
    agreed = []
    everything = []
    for token_ids in held_out.token_ids.split(_WINDOWS_AT_ONCE):
        hidden = hidden_states(target, token_ids, head.hidden_layers)
        drafted = head.draft(token_ids, hidden, places)
        agreed.append((drafted == token_ids[:, ahead]).cumprod(dim=-1))
        everything.append(hidden)
    head.calibrate(held_out.token_ids, torch.cat(everything), places)
    return torch.cat(agreed).float().mean(dim=(0, 1)).tolist()
