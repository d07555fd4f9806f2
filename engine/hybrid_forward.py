"""The forward of a model with recurrent layers: its own, with our operators over its sequences' states."""

from __future__ import annotations

from collections.abc import Sequence

from engine.attention.interface import AttentionBackend
from engine.forward import Forward
from engine.loader import LoadedModel
from engine.recurrent.native import operators_of
from engine.recurrent.state_slots import StateSlots
from engine.rows import SequenceRows, span_of


class HybridForward(Forward):
    def __init__(
        self,
        loaded: LoadedModel,
        backend: AttentionBackend,
        state_slots: StateSlots,
        hidden_layers: tuple[int, ...] = (),
        *,
        products: str,
        packed: bool,
    ) -> None:
        super().__init__(
            loaded.model,
            backend,
            "off",
            hidden_layers,
            products=products,
            packed=packed,
            adapters=loaded.adapters,
        )
        assert loaded.recurrent is not None
        self._hooks = loaded.recurrent.hooks
        self._operators = operators_of(state_slots)
        self.choice = f"eager, recurrent layers by {self._operators.name} operators"

    def _begin(self, batch: Sequence[SequenceRows]) -> None:
        super()._begin(batch)
        self._operators.begin_step([span_of(rows) for rows in batch])
        self._hooks.operators = self._operators
