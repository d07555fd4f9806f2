"""Which forward runs a model: the native decoder where it fits, else Transformers' own, compiled or eager."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from engine.attention.cpu_kernel.backend import CpuBackend
from engine.attention.interface import AttentionBackend
from engine.decoder.description import unfit
from engine.decoder.forward import DecoderForward
from engine.forward import Forward, ForwardOutput
from engine.linear.packed import kernel_fault, pack_linears
from engine.loader import LoadedModel
from native.build import BuildError

logger = logging.getLogger("tandem.engine")


class PackedForward(Protocol):
    """Callable (token_ids [rows], positions [rows], logit_rows) -> ForwardOutput. `choice` says what it is,
    `products` how it multiplies."""

    choice: str
    products: str

    def warm_up(self, run: Callable[[], None]) -> float: ...

    def padded_rows(self, total_tokens: int) -> int: ...

    def __call__(self, token_ids: Tensor, positions: Tensor, logit_rows: list[int]) -> ForwardOutput: ...


def build_forward(
    loaded: LoadedModel, backend: AttentionBackend, compile: str, hidden_layers: tuple[int, ...] = ()
) -> PackedForward:
    """`compile` is the option's value: "auto" takes the native decoder for the models that it knows.

    What the model's layers weigh is then freed: only its embeddings, final norm and head stay usable.
    """
    fault = kernel_fault(loaded.device, loaded.dtype)
    if fault is not None:
        return Forward(loaded.model, loaded.device, compile, hidden_layers, products=fault)
    if compile == "auto" and isinstance(backend, CpuBackend) and unfit(loaded.model) is None:
        try:
            decoder = DecoderForward(loaded.model, backend, loaded.max_model_len, hidden_layers)
        except BuildError as error:
            logger.warning("the native decoder cannot be built: %s", error)
        else:
            loaded.model.model.layers.to("meta")
            return decoder
    packed = f"{pack_linears(loaded.model)} packed layers, summed alike in every batch"
    return Forward(loaded.model, loaded.device, compile, hidden_layers, products=packed, packed=True)
