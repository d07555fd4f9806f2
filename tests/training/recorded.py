"""Hidden states and answers of a small model by Transformers, to compare with and to train on."""

from __future__ import annotations

import torch
from torch import Tensor

from training.heads.contract import Target


@torch.no_grad()
def hidden_states(target: Target, token_ids: Tensor, layers: tuple[int, ...]) -> Tensor:
    """Return the hidden states of these layers: [windows, length, len(layers) * hidden_size]."""
    output = target.model(input_ids=token_ids, output_hidden_states=True)
    return torch.cat([output.hidden_states[layer] for layer in layers], dim=-1)


def continued(target: Target, prompts: Tensor, num_tokens: int) -> Tensor:
    """Return `prompts` [windows, length] with the model's greedy continuations."""
    mask = torch.ones_like(prompts)
    made: Tensor = target.model.generate(
        prompts,
        attention_mask=mask,
        max_new_tokens=num_tokens,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    return made
