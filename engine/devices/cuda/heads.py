"""Draft heads on a CUDA device: programs by torch's operators, their steps replayed as graphs."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.batch.runner import Fill, ForwardOutput, Step
from engine.batch.step_inputs import StepInputs
from engine.devices.cuda.buckets import MOST_ROWS, Buckets
from engine.devices.cuda.graphs import Graphs
from engine.devices.cuda.runner import CudaRunner, graphs_for
from engine.devices.loaded_model import LoadedModel
from engine.devices.torch import transformers_hook
from engine.devices.torch.program import TorchProgram
from engine.kv.attention import AttentionBackend
from protocol.config import ServeConfig


class HeadDecoder:
    """A head that reads hidden states at one address, as many as there is room for."""

    name = "torch's operators"

    def __init__(self, program: TorchProgram, backend: AttentionBackend) -> None:
        self._program = program
        self._backend = backend
        self._kept = program.program.embeddings.new_zeros((MOST_ROWS, program.program.hidden_size))
        self._hidden = self._kept

    def feed(self, hidden: Tensor) -> None:
        """Set the hidden states before the next forward's rows, [rows, hidden_size]."""
        self._hidden = hidden
        if len(hidden) <= len(self._kept):
            self._kept[: len(hidden)].copy_(hidden)
            self._hidden = self._kept

    def forward(self, inputs: StepInputs) -> tuple[Tensor, Tensor | None]:
        transformers_hook.set_current_backend(self._backend)
        hidden = self._hidden[: len(inputs.token_ids)]
        logits, fed_back = self._program(inputs.token_ids, inputs.positions, inputs.logit_rows, hidden)
        return logits, fed_back


class HeadRunner(CudaRunner):
    """The output's hidden states, too, hold until the next call."""

    def __init__(
        self,
        head: HeadDecoder,
        backend: AttentionBackend,
        device: torch.device,
        products: str,
        buckets: Buckets,
        graphs: Graphs | None = None,
    ) -> None:
        super().__init__(head, backend, device, products, buckets, graphs)
        self._head = head

    @torch.inference_mode()
    def run(self, step: Step, fill: Fill | None = None) -> ForwardOutput:
        assert step.hidden is not None
        self._head.feed(step.hidden)
        logits, hidden, _ = self._run(step, fill)
        assert hidden is not None
        return ForwardOutput(logits, hidden[: len(step.logit_rows)])


def head_runner_of(
    config: ServeConfig, program: TorchProgram, target: LoadedModel, backend: AttentionBackend, products: str
) -> HeadRunner:
    """Return a runner of a head that drafts for `target`."""
    buckets = Buckets.of_heads(config, target.max_model_len)
    graphs = graphs_for(config, target.device)
    return HeadRunner(HeadDecoder(program, backend), backend, target.device, products, buckets, graphs)
