"""The training loop's view of draft heads."""

from __future__ import annotations

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
