"""The choice of a model's forward: the native decoder where it fits, else its modules, compiled or eager."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from engine.batch.runner import Runner
from engine.devices.attention import backend_for, backend_over, by_table
from engine.devices.cpu.decoder.description import Description, unfit, unfit_head
from engine.devices.cpu.decoder.forward import NativeDecoder
from engine.devices.cpu.decoder.native_model import DTYPES, library
from engine.devices.cpu.recurrent.native import kernels
from engine.devices.loaded_model import LoadedModel
from engine.devices.recurrent import operators_of
from engine.devices.torch.latent_attention import pack_absorbed
from engine.devices.torch.program import ProgramForward, TorchProgram
from engine.devices.torch.runner import HeadModules, Modules, TorchRunner
from engine.kv.attention import AttentionBackend, NativeBackend
from engine.kv.layout import TARGET
from engine.kv.pool import KVPool
from engine.kv.state_slots import StateSlots
from engine.linear.experts import RoutedLinear, RoutedQuantizedLinear, pack_experts
from engine.linear.packed import PackedLinear, kernel_fault, pack_linears
from engine.linear.packed_quantized import (
    PackedQuantizedLinear,
    PackedWeight,
    dequantize_linears,
    fits,
    join,
    packed,
)
from engine.linear.quantized import round_to_nearest
from engine.load.loader import load_model
from engine.model.program import ModelProgram
from engine.quantization.weight import CodeFormat
from native.build import BuildError
from protocol.config import ServeConfig

logger = logging.getLogger("tandem.engine")


def load_packed(config: ServeConfig, *, on_host: bool = False) -> LoadedModel:
    """Load the configuration's model (`load_model`), packed for the forward that will run it."""
    loaded = load_model(config, on_host=on_host)
    backend, _ = backend_for(config, loaded.device, loaded.dtype)
    return pack_model(loaded, config.compile, backend)


def runner_of_one_process(
    config: ServeConfig, loaded: LoadedModel, pool: KVPool, hidden_layers: tuple[int, ...]
) -> Runner:
    """Return a packed model's runner over this pool, which captures these layers' hidden states."""
    backend, _ = backend_for(config, loaded.device, loaded.dtype)
    attention = backend_over(backend, pool.layers(TARGET), pool.groups[TARGET])
    return runner_of(config, loaded, attention, hidden_layers, pool.state_slots)


def runner_of(
    config: ServeConfig,
    loaded: LoadedModel,
    attention: AttentionBackend,
    hidden_layers: tuple[int, ...] = (),
    state_slots: StateSlots | None = None,
    *,
    drafts: bool = False,
) -> Runner:
    """Return a packed model's best runner; with `drafts`, one that drafts chains."""
    if not attention.can_capture or config.compile != "auto":
        return build_runner(loaded, attention, config.compile, hidden_layers, state_slots)
    cuda = importlib.import_module("engine.devices.cuda.runner")  # Triton is not installed on every host
    runner: Runner = cuda.runner_of(config, loaded, attention, hidden_layers, state_slots, drafts)
    return runner


def build_runner(
    loaded: LoadedModel,
    backend: AttentionBackend,
    compile: str,
    hidden_layers: tuple[int, ...] = (),
    state_slots: StateSlots | None = None,
) -> Runner:
    """Return the native decoder, or a torch runner of the modules. Pack the model if it is not packed yet."""
    if loaded.share is not None:
        program = TorchProgram(
            loaded.share.program,
            loaded.max_model_len,
            hidden_layers,
            None if state_slots is None else operators_of(state_slots),
            () if state_slots is None else state_slots.layout.layers,
            adapters=loaded.adapters,
        )
        forward, is_ours = ProgramForward(program, backend), kernel_fault(loaded.device, loaded.dtype) is None
        return TorchRunner(forward, backend, loaded.device, "off", products="a rank's own", packed=is_ours)
    loaded = pack_model(loaded, compile, type(by_table(backend)[0][0]))
    if loaded.description is not None:
        return NativeDecoder(loaded.description, backend, hidden_layers, loaded.adapters, state_slots)
    fault = kernel_fault(loaded.device, loaded.dtype)
    if fault is not None:
        if loaded.device.type == "cpu":
            dequantize_linears(loaded.model, loaded.dtype)  # torch would dequantize in every step
        return modules_runner(loaded, backend, compile, hidden_layers, state_slots, products=fault)
    packed_layers = PackedLinear, PackedQuantizedLinear, RoutedLinear, RoutedQuantizedLinear
    count = sum(isinstance(module, packed_layers) for module in loaded.model.modules())
    packed = f"{count} packed layers, summed alike in every batch"
    return modules_runner(loaded, backend, compile, hidden_layers, state_slots, products=packed, packed=True)


def modules_runner(
    loaded: LoadedModel,
    backend: AttentionBackend,
    compile: str = "off",
    hidden_layers: tuple[int, ...] = (),
    state_slots: StateSlots | None = None,
    *,
    products: str = "",
    packed: bool = False,
) -> TorchRunner:
    """Return a torch runner of the model's current modules."""
    hooks = None if loaded.recurrent is None else loaded.recurrent.hooks
    operators = None if state_slots is None else operators_of(state_slots)
    forward = Modules(loaded.model, backend, hidden_layers, loaded.adapters, hooks, operators)
    return TorchRunner(forward, backend, loaded.device, compile, products=products, packed=packed)


def runner_of_head(
    config: ServeConfig,
    program: Callable[[], ModelProgram],
    parts: nn.Module,
    positions: int,
    target: LoadedModel,
    backend: AttentionBackend,
) -> Runner:
    """Return a runner of a draft head, which `program` describes, with linear layers in `parts`."""
    natively = config.compile == "auto" and kernel_fault(target.device, target.dtype, DTYPES) is None
    native: Runner | None = None
    if natively and isinstance(by_table(backend)[0][0], NativeBackend) and unfit_head(program()) is None:
        try:
            if target.dtype is not torch.bfloat16:
                dequantize_linears(parts, target.dtype)
            described = _with_rounded_lm_head(program(), target)
            native = NativeDecoder(Description(described, positions), backend)
        except BuildError as error:
            logger.warning("the native decoder cannot be built: %s", error)
    if native is not None:
        return native
    fault = kernel_fault(target.device, target.dtype)
    if fault is None:
        pack_experts(parts)
        pack_linears(parts)
    products, by_torch = fault or "packed weights", TorchProgram(program(), positions)
    if backend.can_capture and config.compile == "auto":
        cuda = importlib.import_module("engine.devices.cuda.runner")
        runner: Runner = cuda.runner_of_head(config, by_torch, target, backend, products)
        return runner
    forward, packed = ProgramForward(by_torch, backend), fault is None
    return TorchRunner(forward, backend, target.device, config.compile, products=products, packed=packed)


_ROWS = 1 << 13
"""Number of LM head outputs rounded at a time, to save memory."""


def _with_rounded_lm_head(program: ModelProgram, target: LoadedModel) -> ModelProgram:
    """Give a draft head that uses the target's bfloat16 LM head an int8 copy of it. The native decoder copies
    the LM head anyway, and reading it is most of a draft token's cost. Drafts need no exact logits.
    """
    (lm_head,) = program.head.linears
    if lm_head is not target.model.get_output_embeddings() or type(lm_head) is not nn.Linear:
        return program
    weight = lm_head.weight.detach()
    if weight.dtype is not torch.bfloat16:
        return program
    parts = [round_to_nearest(part, CodeFormat.INT8, weight.shape[1]) for part in weight.split(_ROWS)]
    if not fits(parts[0]):
        return program
    rounded = PackedQuantizedLinear(join([*map(packed, parts)]), lm_head.bias)
    return replace(program, head=replace(program.head, linears=(rounded,)))


def modules_runner_of_head(
    model: PreTrainedModel, target: LoadedModel, backend: AttentionBackend, *, hidden_of_all: bool = False
) -> Runner:
    """Return a runner of a draft head by its modules: a model with an Entrance, which is packed."""
    fault = kernel_fault(target.device, target.dtype)
    if fault is None:
        pack_experts(model)
        pack_absorbed(model)
        pack_linears(model)
    elif target.device.type == "cpu":
        dequantize_linears(model, target.dtype)
    forward = HeadModules(model, backend, hidden_of_all=hidden_of_all)
    products = fault or "packed weights"
    return TorchRunner(forward, backend, target.device, "off", products=products, packed=fault is None)


def _read_from(codes: PackedWeight, embeddings: nn.Module) -> None:
    """Free a module's embeddings, which `codes` have as well. Each later use of the weight reads them from
    there; the module has its own again once it runs, as a part of a draft head.
    """
    del embeddings.weight
    kind = type(embeddings)

    def forward(self: nn.Module, token_ids: Tensor) -> Any:
        table = self.weight
        self.__class__ = kind
        self.weight = nn.Parameter(table, requires_grad=False)
        return self(token_ids)

    weight = property(lambda self: codes.bfloat16_rows(0, codes.out_features))
    embeddings.__class__ = type(kind.__name__, (kind,), {"weight": weight, "forward": forward})


def _runs_natively(loaded: LoadedModel) -> bool:
    """Return whether the native decoder runs the model. Ranks share experts and recurrent layers by their
    modules, and the kernels of experts and adapters need bfloat16.
    """
    if kernel_fault(loaded.device, loaded.dtype, DTYPES) is not None:
        return False
    program = loaded.program
    if program is None or unfit(program) is not None:
        return False
    if loaded.dtype is not torch.bfloat16 and (program.has_experts or loaded.adapters is not None):
        return False
    return not (loaded.in_ranks and (program.has_experts or loaded.recurrent is not None))


def pack_model(loaded: LoadedModel, compile: str, backend: type[AttentionBackend]) -> LoadedModel:
    """Return the model, packed for this backend's forward if our kernels do the products.

    "auto" takes the native decoder for models that it supports. The model's layers then lose their weights:
    only embeddings, final norm and head stay usable.
    """
    if loaded.description is not None:
        return loaded
    if compile == "auto" and issubclass(backend, NativeBackend) and _runs_natively(loaded):
        try:
            library(loaded.dtype)
            if loaded.recurrent is not None:
                kernels()
        except BuildError as error:
            logger.warning("the native decoder cannot be built: %s", error)
        else:
            if loaded.dtype is not torch.bfloat16:
                dequantize_linears(loaded.model, loaded.dtype)
            program, layers = loaded.program, loaded.model.model.layers
            assert program is not None
            described = Description(program, loaded.max_model_len, lambda number: layers[number].to("meta"))
            if described.coded_embeddings is not None:
                _read_from(described.coded_embeddings, loaded.model.get_input_embeddings())
            return replace(loaded, description=described)
    if kernel_fault(loaded.device, loaded.dtype) is None:
        pack_experts(loaded.model)
        pack_absorbed(loaded.model)
        pack_linears(loaded.model)
    return loaded
