"""Trains draft heads in the training loop, and measures how often the target itself would say their tokens.

That is measured at every place of the target's own greedy continuations of held-out text: these are the
sequences in which greedy verification takes place.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from training.data import Windows
from training.heads.contract import Target, TrainableHead


class HeadLearner:
    """Implements `training.loop.Learner`: AdamW on the head, fed with the target's hidden states."""

    def __init__(self, head: TrainableHead, target: Target, windows: Windows, learning_rate: float) -> None:
        self._head = head
        self._target = target
        self._windows = windows
        self.module: nn.Module = head.module
        self.batch_tokens = windows.batch_tokens
        parameters = [p for p in head.module.parameters() if p.requires_grad]
        self.optimizers = {
            "adamw": torch.optim.AdamW(parameters, lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.0)
        }

    def backward(self, step: int) -> float:
        token_ids = self._windows[step].to(self._target.device)
        loss = self._head.loss(token_ids, hidden_states(self._target, token_ids, self._head.hidden_layers))
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.item()

    def updated(self) -> None:
        """Do nothing: the optimizer steps the head's own parameters."""


@torch.no_grad()
def hidden_states(target: Target, token_ids: Tensor, layers: tuple[int, ...]) -> Tensor:
    """Return the hidden states of these layers, concatenated: [windows, length, len(layers) * hidden_size].

    `token_ids` int64 [windows, length].
    """
    output = target.model(input_ids=token_ids, use_cache=False, output_hidden_states=True, logits_to_keep=1)
    return torch.cat([output.hidden_states[layer] for layer in layers], dim=-1)


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
