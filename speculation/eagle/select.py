"""Which forward runs a head: the native decoder where it fits, else torch's operators, compiled or not."""

from __future__ import annotations

import importlib
import logging

from torch import nn

from engine.batch.runner import Runner
from engine.devices.cpu.attention.backend import CpuBackend
from engine.devices.cpu.decoder.native_model import DTYPES
from engine.devices.loaded_model import LoadedModel
from engine.kv.attention import AttentionBackend
from engine.linear.packed import kernel_fault, pack_linears
from engine.linear.packed_quantized import PackedQuantizedLinear
from native.build import BuildError
from protocol.config import ServeConfig
from speculation.eagle.native import NativeHead, unfit_head
from speculation.eagle.paged import HeadForward, PagedHead
from speculation.eagle.weights import LoadedHead

logger = logging.getLogger("tandem.speculation")


def build_head_runner(
    config: ServeConfig, loaded: LoadedHead, target: LoadedModel, backend: AttentionBackend
) -> Runner:
    """`--compile auto` prefers the native decoder, and on CUDA devices graphs."""
    fault = kernel_fault(target.device, target.dtype)
    embedding, lm_head = _tables(loaded, target)
    native = None
    runs_natively = kernel_fault(target.device, target.dtype, DTYPES) is None
    if config.compile == "auto" and runs_natively and isinstance(backend, CpuBackend):
        native = _native(loaded, embedding, lm_head, backend)
    head = PagedHead(loaded.head, embedding, lm_head)
    if fault is None:
        pack_linears(head)
    if native is not None:
        return native
    products = fault or "packed weights"
    if backend.name == "triton" and config.compile == "auto":
        graphed = importlib.import_module("speculation.eagle.graphed")
        runner: Runner = graphed.head_runner_of(config, head, target, backend, products)
        return runner
    return HeadForward(head, backend, target.device, config.compile, products=products, packed=fault is None)


def _tables(loaded: LoadedHead, target: LoadedModel) -> tuple[nn.Module, nn.Module]:
    """Embedding and LM head: the target's where the file has none of its own."""
    embedding, lm_head = target.model.get_input_embeddings(), target.model.get_output_embeddings()
    if loaded.embedding is not None:
        embedding = nn.Embedding.from_pretrained(loaded.embedding)
    if loaded.lm_head is not None:
        lm_head = loaded.lm_head
    return embedding, lm_head


def _native(
    loaded: LoadedHead, embedding: nn.Module, lm_head: nn.Module, backend: CpuBackend
) -> NativeHead | None:
    fits = isinstance(lm_head, nn.Linear | PackedQuantizedLinear)
    if unfit_head(loaded.head) is not None or type(embedding) is not nn.Embedding or not fits:
        return None  # among others a target that scales its embeddings, or whose LM head is packed already
    try:
        return NativeHead(loaded.head, embedding.weight, lm_head, loaded.draft_ids, backend)
    except BuildError as error:
        logger.warning("the native decoder cannot be built: %s", error)
        return None
