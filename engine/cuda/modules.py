"""Any other model on a CUDA device: its own modules, whose launches graphs replay."""

from __future__ import annotations

from torch import Tensor
from transformers import PreTrainedModel

from engine.attention import transformers_hook
from engine.attention.interface import AttentionBackend
from engine.forward import run_model
from engine.step_inputs import StepInputs


class Modules:
    name = "the model's own modules"

    def __init__(
        self, model: PreTrainedModel, backend: AttentionBackend, hidden_layers: tuple[int, ...] = ()
    ) -> None:
        """`hidden_layers` are captured, numbered as in Transformers' `hidden_states`."""
        self._model = model
        self._backend = backend
        self._hidden_layers = hidden_layers

    def forward(self, inputs: StepInputs) -> tuple[Tensor, Tensor | None]:
        """As `Decoder.forward`."""
        transformers_hook.set_current_backend(self._backend)
        rows = inputs.token_ids.unsqueeze(0), inputs.positions.unsqueeze(0), inputs.logit_rows
        logits, hidden = run_model(self._model, self._hidden_layers, *rows)
        return logits[0], None if hidden is None else hidden[0]
