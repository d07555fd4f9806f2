"""The forward of a model with recurrent layers: its own, with our operators over its sequences' states."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedModel

from engine.batch.rows import SequenceRows, span_of
from engine.devices.torch.forward import Forward
from engine.devices.torch.recurrent import StepOperators
from engine.devices.torch.recurrent_hooks import RecurrentHooks
from engine.kv.attention import AttentionBackend
from engine.lora.table import Adapters


class HybridForward(Forward):
    def __init__(
        self,
        model: PreTrainedModel,
        backend: AttentionBackend,
        hooks: RecurrentHooks,
        operators: StepOperators,
        hidden_layers: tuple[int, ...] = (),
        *,
        products: str,
        packed: bool,
        adapters: Adapters | None = None,
    ) -> None:
        super().__init__(
            model, backend, "off", hidden_layers, products=products, packed=packed, adapters=adapters
        )
        self._hooks, self._operators = hooks, operators
        self.choice = f"eager, recurrent layers by {operators.name} operators"

    def _begin(self, batch: Sequence[SequenceRows]) -> None:
        super()._begin(batch)
        self._operators.begin_step([span_of(rows) for rows in batch])
        self._hooks.operators = self._operators
