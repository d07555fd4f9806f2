"""The CUDA decoder as a `Runner`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.attention.triton_kernel.backend import TritonBackend
from engine.cuda.decoder import CudaDecoder
from engine.loader import LoadedModel
from engine.rows import SequenceRows
from engine.runner import ForwardOutput
from engine.step_inputs import StepShape, step_inputs
from engine.upload import Uploader


class CudaRunner:
    choice = "CUDA decoder, eager"
    any_threads = False

    def __init__(
        self, decoder: CudaDecoder, backend: TritonBackend, device: torch.device, products: str
    ) -> None:
        self.products = products
        self._decoder = decoder
        self._backend = backend
        self._upload = Uploader(device)

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
        backend = self._backend
        inputs = step_inputs(batch, logit_rows, self._upload, backend.arena, backend.block_size, StepShape())
        backend.begin_step(inputs.attention)
        logits, hidden = self._decoder.forward(inputs)
        return ForwardOutput(logits, hidden if wants_hidden else None)


def runner_of(loaded: LoadedModel, backend: TritonBackend, hidden_layers: tuple[int, ...] = ()) -> CudaRunner:
    decoder = CudaDecoder(loaded.model, backend, loaded.max_model_len, hidden_layers)
    products = f"cuBLAS, {str(loaded.dtype).removeprefix('torch.')}"
    return CudaRunner(decoder, backend, loaded.device, products)
