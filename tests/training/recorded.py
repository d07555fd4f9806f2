"""Hidden states and answers of a small model by Transformers, to compare with and to train on."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.speculation.eagle_engine import Watched
from training.heads.contract import Target, TrainableHead


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


def assert_drafts_as_trained(watched: Watched, head: TrainableHead, target: Target) -> None:
    """Compare drafts of the head's whole depth with the chains that training unrolls."""
    whole = [each for each in watched.drafts if len(each[2]) == head.depth]
    assert len(whole) > 3
    for _, token_ids, drafted in whole:
        ids = torch.tensor([token_ids])
        hidden = hidden_states(target, ids, head.hidden_layers)
        chain = head.draft(ids, hidden, torch.tensor([len(token_ids) - 2]))
        assert chain[0, 0].tolist() == drafted


def learned(head: TrainableHead, token_ids: Tensor, hidden: Tensor, num_steps: int) -> list[float]:
    """Train the head on one batch. Return the losses."""
    optimizer, losses = torch.optim.AdamW(head.module.parameters(), lr=5e-3), []
    for _ in range(num_steps):
        optimizer.zero_grad()
        loss = head.loss(token_ids, hidden)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses
