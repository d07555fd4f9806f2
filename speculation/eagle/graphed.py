"""The head on a CUDA device, its steps replayed as graphs."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.batch.runner import Fill, ForwardOutput, Step
from engine.batch.step_inputs import StepInputs
from engine.devices.cuda.attention.backend import TritonBackend
from engine.devices.cuda.buckets import MOST_ROWS, Buckets
from engine.devices.cuda.graphs import Graphs
from engine.devices.cuda.runner import CudaRunner, graphs_for
from engine.devices.loaded_model import LoadedModel
from engine.devices.torch import transformers_hook
from protocol.config import ServeConfig
from speculation.eagle.paged import PagedHead


class FedHead:
    """A head whose hidden states lie at one address, as far as they fit there."""

    name = "torch's operators"

    def __init__(
        self, head: PagedHead, backend: TritonBackend, device: torch.device, dtype: torch.dtype
    ) -> None:
        self._head = head
        self._backend = backend
        self._kept = torch.zeros((MOST_ROWS, head.head.shape.hidden_size), dtype=dtype, device=device)
        self._before = self._kept

    def feed(self, before: Tensor) -> None:
        """For the next forward, [rows, hidden_size]."""
        self._before = before
        if len(before) <= len(self._kept):
            self._kept[: len(before)].copy_(before)
            self._before = self._kept

    def forward(self, inputs: StepInputs) -> tuple[Tensor, Tensor | None]:
        transformers_hook.set_current_backend(self._backend)
        before = self._before[: len(inputs.token_ids)]
        logits, hidden = self._head(inputs.token_ids, inputs.positions, before, inputs.logit_rows)
        return logits, hidden


class HeadRunner(CudaRunner):
    """The output's hidden states, too, hold until the next call."""

    def __init__(
        self,
        head: FedHead,
        backend: TritonBackend,
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
    config: ServeConfig, head: PagedHead, target: LoadedModel, backend: TritonBackend, products: str
) -> HeadRunner:
    fed = FedHead(head, backend, target.device, target.dtype)
    buckets = Buckets.of_heads(config, target.max_model_len)
    return HeadRunner(fed, backend, target.device, products, buckets, graphs_for(config, target.device))
