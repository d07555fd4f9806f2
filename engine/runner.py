"""Runs packed forwards of a model over the blocks of a pool."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.attention.interface import AttentionBackend
from engine.forward import ForwardOutput
from engine.rows import SequenceRows
from engine.select_forward import PackedForward
from engine.step_inputs import StepInputs


class Runner:
    """Runs `forward` over blocks of `block_size` tokens in the pool that `backend` was made for."""

    def __init__(
        self, forward: PackedForward, backend: AttentionBackend, block_size: int, device: torch.device
    ) -> None:
        self._forward = forward
        self._backend = backend
        self._block_size = block_size
        self._device = device

    def run(
        self,
        batch: Sequence[SequenceRows],
        logit_rows: list[int],
        *,
        wants_hidden: bool = True,
        before: Tensor | None = None,
    ) -> ForwardOutput:
        """Write the KV of all rows; the logits are those of the packed rows asked for.

        `before` [rows, hidden_size]: for a draft head, the hidden states before the rows.
        """
        return self._forward.run(self._inputs(batch), logit_rows, wants_hidden=wants_hidden, before=before)

    def warm_up(self) -> float:
        """Compile the forward if it is to be; returns the seconds it took."""
        return self._forward.warm_up(self._inputs([]))

    def _inputs(self, batch: Sequence[SequenceRows]) -> StepInputs:
        return StepInputs(batch, self._backend, self._block_size, self._device)
