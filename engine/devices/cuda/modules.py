"""Models that no executor of programs runs on a CUDA device: their own modules, replayed as graphs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor
from transformers import PreTrainedModel

from engine.batch.recurrent_plan import Room, Tables
from engine.batch.rows import SequenceRows, span_of
from engine.batch.step_inputs import StepInputs, StepShape
from engine.devices.cuda.adapters import AdaptedProduct, ModuleAdapters
from engine.devices.cuda.recurrent.operators import TritonOperators
from engine.devices.loaded_model import LoadedModel
from engine.devices.torch import transformers_hook
from engine.devices.torch.forward import run_model
from engine.kv.attention import AttentionBackend
from engine.kv.state_slots import StateSlots
from engine.lora.layers import attach, begin_step
from engine.lora.table import Adapters


class Modules:
    name = "the model's own modules"

    def __init__(
        self,
        model: PreTrainedModel,
        backend: AttentionBackend,
        hidden_layers: tuple[int, ...] = (),
        adapters: Adapters | None = None,
    ) -> None:
        """`hidden_layers` are captured, numbered as in Transformers' `hidden_states`."""
        self._model = model
        self._backend = backend
        self._hidden_layers = hidden_layers
        self._adapted: dict[str, AdaptedProduct] = {}
        if adapters is not None:
            attach(model, adapters)
            self._adapted = {path: AdaptedProduct.of([path], adapters) for path in adapters.linears}

    def forward(self, inputs: StepInputs) -> tuple[Tensor, Tensor | None]:
        """As `Decoder.forward`."""
        transformers_hook.set_current_backend(self._backend)
        adapters = inputs.adapters
        begin_step(() if adapters is None else [ModuleAdapters(self._adapted, adapters)])
        rows = inputs.token_ids.unsqueeze(0), inputs.positions.unsqueeze(0), inputs.logit_rows
        logits, hidden = run_model(self._model, self._hidden_layers, *rows)
        return logits[0], None if hidden is None else hidden[0]


class HybridModules(Modules):
    """Modules with recurrent layers, over the states of sequences in `state_slots`."""

    name = f"{Modules.name}, recurrent layers by {TritonOperators.name} operators"

    def __init__(
        self,
        loaded: LoadedModel,
        backend: AttentionBackend,
        state_slots: StateSlots,
        hidden_layers: tuple[int, ...] = (),
        drafts: bool = False,
    ) -> None:
        """`drafts`: lone rows of sequences may be drafted, too."""
        super().__init__(loaded.model, backend, hidden_layers, loaded.adapters)
        assert loaded.recurrent is not None
        self._hooks = loaded.recurrent.hooks
        self._layout = state_slots.layout
        self._operators = TritonOperators(state_slots)
        self._drafts = drafts

    def tables(self, batch: Sequence[SequenceRows], shape: StepShape | None) -> Tables[np.ndarray]:
        """Return the operators' tables for a step. Tables of one shape have the same sizes."""
        room = None if shape is None else self._room(shape)
        return self._operators.tables([span_of(rows) for rows in batch], room)

    def _room(self, shape: StepShape) -> Room:
        drafts = self._drafts or shape.rows_each > 1
        return Room.of(self._layout, shape.sequences, shape.rows_each, trees=shape.trees, drafts=drafts)

    def forward(self, inputs: StepInputs) -> tuple[Tensor, Tensor | None]:
        """As `Decoder.forward`."""
        assert inputs.recurrent is not None
        self._operators.use(inputs.recurrent)
        self._hooks.operators = self._operators
        return super().forward(inputs)
