"""Trains draft heads on a recording, and measures how often the target itself would say their tokens.

That is measured at every place of the target's own greedy answers to held-out text: these are the sequences
in which greedy verification takes place.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from protocol.errors import ConfigError
from training.data import Windows
from training.heads.contract import Target, TrainableHead
from training.recording import Recorded, Recording


class HeadLearner:
    """Implements `training.loop.Learner`: AdamW on the head, fed with the target's recorded hidden states."""

    def __init__(
        self,
        head: TrainableHead,
        target: Target,
        recording: Recording,
        windows: Windows,
        learning_rate: float,
    ) -> None:
        self._head = head
        self._device = target.device
        self._tokens, self._hidden = recording.tokens, recording.hidden
        self._windows = windows
        self.module: nn.Module = head.module
        self.batch_tokens = windows.batch_tokens
        parameters = [p for p in head.module.parameters() if p.requires_grad]
        adamw = torch.optim.AdamW(
            parameters, lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.0, fused=True
        )
        self.optimizers = {"adamw": adamw}

    def backward(self, step: int) -> float:
        places = self._windows[step]
        token_ids = self._tokens[places].long().to(self._device)
        loss = self._head.loss(token_ids, self._hidden[places].to(self._device))
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.item()

    def updated(self) -> None:
        """Do nothing: the optimizer steps the head's own parameters."""


@torch.no_grad()
def acceptance(head: TrainableHead, held_out: Iterable[Recorded]) -> list[float]:
    """Return, for each position of a greedy chain, how often the target agrees with it and with all
    positions before it. The same texts calibrate the head. Raises `ConfigError` if all answers are too short.
    """
    agreed: list[Tensor] = []
    for text in held_out:
        device = next(head.module.parameters()).device
        token_ids, hidden = text.token_ids.unsqueeze(0).to(device), text.hidden.unsqueeze(0).to(device)
        first, end = text.prompt_length - 1, len(text.token_ids) - 1 - head.depth
        if end <= first:
            continue
        places = torch.arange(first, end, device=device)
        ahead = places.unsqueeze(1) + 2 + torch.arange(head.depth, device=device)
        drafted = head.draft(token_ids, hidden, places)[0]
        agreed.append((drafted == token_ids[0, ahead]).cumprod(dim=-1))
        head.calibrate(token_ids, hidden, places)
    if not agreed:
        raise ConfigError(f"--held-out: no answer has the {head.depth + 2} tokens to measure drafts on")
    return torch.cat(agreed).float().mean(dim=0).tolist()
