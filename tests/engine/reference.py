"""A model's program by torch's operators, which tests compare other executors with."""

from __future__ import annotations

from transformers import PreTrainedModel

from engine.devices.torch.program import ProgramForward, TorchProgram
from engine.devices.torch.recurrent import TorchOperators
from engine.devices.torch.runner import TorchRunner
from engine.kv.attention import AttentionBackend
from engine.kv.state_slots import StateSlots
from engine.model.describe import describe
from tests.engine.kernels import CPU

POSITIONS = 256


def reference(
    model: PreTrainedModel,
    backend: AttentionBackend,
    hidden_layers: tuple[int, ...] = (),
    state_slots: StateSlots | None = None,
) -> TorchRunner:
    """Return a runner of a model's program over the pool of `backend`."""
    operators = None if state_slots is None else TorchOperators(state_slots)
    layers = () if state_slots is None else state_slots.layout.layers
    program = TorchProgram(describe(model), POSITIONS, hidden_layers, operators, layers)
    return TorchRunner(ProgramForward(program, backend), backend, CPU, "off", products="")
