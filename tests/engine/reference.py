"""A model's program by torch's operators, which tests compare other executors with."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from engine.batch.rows import BlockTable, span_of
from engine.batch.runner import ForwardOutput, Step
from engine.batch.step_inputs import StepShape, step_inputs
from engine.devices.torch import transformers_hook
from engine.devices.torch.program import TorchProgram
from engine.devices.torch.recurrent import StepOperators, TorchOperators
from engine.kv.attention import AttentionBackend
from engine.kv.state_slots import StateSlots
from engine.model.describe import describe
from engine.upload import upload_to
from tests.engine.kernels import CPU

POSITIONS = 256


class Reference:
    """A model's program over the pool of `backend`."""

    choice = "torch's operators"

    def __init__(
        self,
        model: PreTrainedModel,
        backend: AttentionBackend,
        hidden_layers: tuple[int, ...] = (),
        state_slots: StateSlots | None = None,
    ) -> None:
        self._operators: StepOperators | None = None if state_slots is None else TorchOperators(state_slots)
        layers = () if state_slots is None else state_slots.layout.layers
        program = describe(model)
        self._program = TorchProgram(program, POSITIONS, hidden_layers, self._operators, layers)
        self._backend = backend
        self._table = BlockTable(backend.block_size, backend.num_tables)

    @torch.inference_mode()
    def run(self, step: Step) -> ForwardOutput:
        inputs = step_inputs(step.batch, step.logit_rows, upload_to(CPU), self._table, StepShape())
        self._backend.begin_step(inputs.attention)
        transformers_hook.set_current_backend(self._backend)
        if self._operators is not None:
            self._operators.begin_step([span_of(rows) for rows in step.batch])
        return ForwardOutput(*self._program(inputs.token_ids, inputs.positions, inputs.logit_rows))
