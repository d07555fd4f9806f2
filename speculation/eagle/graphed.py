"""The head on a CUDA device, its steps replayed as graphs."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.batch.rows import SequenceRows
from engine.batch.runner import ForwardOutput, LateRows
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
    """`hidden` of the output has the rows of the logits, and no others."""

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
    def run(
        self,
        batch: Sequence[SequenceRows],
        logit_rows: list[int],
        *,
        wants_hidden: bool = True,
        before: Tensor | None = None,
    ) -> ForwardOutput:
        logits, hidden = self._run_fed(batch, logit_rows, before)
        return ForwardOutput(logits, hidden.clone())

    @torch.inference_mode()
    def run_late(
        self,
        batch: Sequence[SequenceRows],
        logit_rows: list[int],
        late: LateRows,
        *,
        wants_hidden: bool = True,
        before: Tensor | None = None,
    ) -> ForwardOutput:
        logits, hidden = self._run_fed(batch, logit_rows, before, late=late)
        return ForwardOutput(logits, hidden.clone())

    @torch.inference_mode()
    def run_ahead(
        self,
        batch: Sequence[SequenceRows],
        logit_rows: list[int],
        chosen: Tensor,
        *,
        before: Tensor | None = None,
    ) -> ForwardOutput:
        return ForwardOutput(*self._run_fed(batch, logit_rows, before, chosen))

    def _run_fed(
        self,
        batch: Sequence[SequenceRows],
        logit_rows: list[int],
        before: Tensor | None,
        chosen: Tensor | None = None,
        late: LateRows | None = None,
    ) -> tuple[Tensor, Tensor]:
        assert before is not None
        self._head.feed(before)
        logits, hidden, _ = self._run(batch, logit_rows, chosen, late)
        assert hidden is not None
        return logits, hidden[: len(logit_rows)]


def head_runner_of(
    config: ServeConfig, head: PagedHead, target: LoadedModel, backend: TritonBackend, products: str
) -> HeadRunner:
    fed = FedHead(head, backend, target.device, target.dtype)
    buckets = Buckets.of_heads(config, target.max_model_len)
    return HeadRunner(fed, backend, target.device, products, buckets, graphs_for(config, target.device))
