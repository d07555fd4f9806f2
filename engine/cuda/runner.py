"""The CUDA decoder as a `Runner`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.attention.triton_kernel.backend import TritonBackend
from engine.cuda.buckets import Buckets
from engine.cuda.decoder import CudaDecoder, can_join
from engine.cuda.products import describe
from engine.loader import LoadedModel
from engine.rows import SequenceRows
from engine.runner import ForwardOutput
from engine.step_inputs import StepInputs, StepShape, step_inputs
from engine.upload import Uploader
from protocol.config import ServeConfig


class CudaRunner:
    """Steps that fit a bucket have its shape, and their inputs lie at its addresses."""

    any_threads = False

    def __init__(
        self,
        decoder: CudaDecoder,
        backend: TritonBackend,
        device: torch.device,
        products: str,
        buckets: Buckets,
    ) -> None:
        self.products = products
        self.choice = "CUDA decoder, eager"
        self._decoder = decoder
        self._backend = backend
        self._buckets = buckets
        self._upload, self._upload_bucket = Uploader(device), Uploader(device)

    def warm_up(self) -> float:
        return 0.0

    @torch.inference_mode()
    def run(
        self,
        batch: Sequence[SequenceRows],
        logit_rows: list[int],
        *,
        wants_hidden: bool = True,
        before: Tensor | None = None,
    ) -> ForwardOutput:
        """As `Runner.run`."""
        shape = self._buckets.shape_of(batch, len(logit_rows), self._backend.block_size)
        inputs = self._inputs(batch, logit_rows, shape)
        self._backend.begin_step(inputs.attention)
        logits, hidden = self._decoder.forward(inputs)
        rows = sum(len(rows.token_ids) for rows in batch)
        return ForwardOutput(
            logits[: len(logit_rows)], hidden[:rows] if wants_hidden and hidden is not None else None
        )

    def _inputs(
        self, batch: Sequence[SequenceRows], logit_rows: Sequence[int], shape: StepShape | None
    ) -> StepInputs:
        upload = self._upload if shape is None else self._upload_bucket
        backend = self._backend
        return step_inputs(batch, logit_rows, upload, backend.arena, backend.block_size, shape or StepShape())


def runner_of(
    config: ServeConfig, loaded: LoadedModel, backend: TritonBackend, hidden_layers: tuple[int, ...] = ()
) -> CudaRunner | None:
    """None where layers of one input are multiplied in several ways."""
    if not can_join(loaded.model):
        return None
    decoder = CudaDecoder(loaded.model, backend, loaded.max_model_len, hidden_layers)
    products = describe(loaded.model, loaded.dtype)
    buckets = Buckets.of(config, loaded.max_model_len)
    return CudaRunner(decoder, backend, loaded.device, products, buckets)
