"""The training loop's view of a model: fp32 master weights, Muon for matrices, AdamW for the rest."""

import copy
from collections.abc import Callable
from typing import Protocol

import torch
from transformers import PreTrainedModel

Loss = Callable[[torch.Tensor], torch.Tensor]
"""A function of tokens [windows, length + 1] that returns a mean in nats."""


class BatchOf(Protocol):
    """`batches(step)` returns int64 [windows, length + 1]."""

    def __call__(self, step: int) -> torch.Tensor: ...


class ModelLearner:
    """Implements `training.loop.Learner`. Passes run in the model's dtype, the optimizers in fp32.

    Muon (Jordan et al., 2024) orthogonalizes the momentum of each weight matrix; its update is scaled to
    AdamW's RMS (Liu et al., 2025), so that one learning rate fits both.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        loss: Loss,
        batches: BatchOf,
        *,
        learning_rate: float,
        batch_tokens: int,
        micro_tokens: int,
    ) -> None:
        self._model = model
        self._loss = loss
        self._batches = batches
        self._micro_tokens = micro_tokens
        self.batch_tokens = batch_tokens
        self.module = copy.deepcopy(model).float()
        named = list(self.module.named_parameters())
        matrices = [p for name, p in named if p.ndim == 2 and ".layers." in name]
        others = [p for name, p in named if p.ndim != 2 or ".layers." not in name]
        self.optimizers = {
            "adamw": torch.optim.AdamW(others, lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.0),
            "muon": torch.optim.Muon(
                matrices, lr=learning_rate, weight_decay=0.05, adjust_lr_fn="match_rms_adamw"
            ),
        }

    def backward(self, step: int) -> float:
        tokens = self._batches(step)
        micros = tokens.split(max(1, self._micro_tokens // (tokens.shape[1] - 1)))
        total = 0.0
        for micro in micros:
            loss = self._loss(micro) / len(micros)
            loss.backward()  # type: ignore[no-untyped-call]
            self._take_gradients()
            total += loss.item()
        return total

    def _take_gradients(self) -> None:
        for master, parameter in zip(self.module.parameters(), self._model.parameters(), strict=True):
            assert parameter.grad is not None
            gradient = parameter.grad.float()
            master.grad = gradient if master.grad is None else master.grad.add_(gradient)
            parameter.grad = None

    @torch.no_grad()
    def updated(self) -> None:
        for master, parameter in zip(self.module.parameters(), self._model.parameters(), strict=True):
            parameter.copy_(master)
