"""The choice of our kernel for linear layers on a GPU (`engine.devices.cuda.products`)."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from engine.devices.attention import backend_fault, backend_of
from engine.linear.experts import Pack, are_experts
from engine.linear.quantized import QuantizedLinear
from engine.model.describe import UndescribedModelError, describe
from engine.model.program import LatentAttention
from protocol.config import ServeConfig

_TILED = (nn.Linear, Conv1D, QuantizedLinear)
_STATES = "A_log"
"""A recurrent layer's parameter that our operators read row by row, like its convolution."""


def tile_on_gpu(model: nn.Module, device: torch.device, dtype: torch.dtype, *, plain: bool = False) -> None:
    """Pack the model's quantized layers, and with `plain` all linear ones. Without Triton, torch dequantizes
    quantized layers in each step.
    """
    if backend_fault("triton", device, dtype) is None:
        importlib.import_module("engine.devices.cuda.products").tile_linears(model, dtype, plain=plain)


def tile_experts_on_gpu(model: nn.Module, device: torch.device, dtype: torch.dtype) -> None:
    """Pack the model's experts, if Triton can run."""
    if backend_fault("triton", device, dtype) is None:
        importlib.import_module("engine.devices.cuda.experts").tile_experts(model, dtype)


def packing_of_experts(device: torch.device, dtype: torch.dtype) -> Pack | None:
    """Return what packs the layers of several experts for a GPU; None if nothing does."""
    if device.type != "cuda" or backend_fault("triton", device, dtype) is not None:
        return None
    return partial(importlib.import_module("engine.devices.cuda.experts").RoutedTiles.of, dtype=dtype)


def tiling(config: ServeConfig, device: torch.device, dtype: torch.dtype) -> Callable[[nn.Module], nn.Module]:
    """Return what packs a linear layer or experts of a model as those of a model on one GPU are packed."""
    if device.type != "cuda" or backend_fault("triton", device, dtype) is not None:
        return lambda part: part
    tiled_part = importlib.import_module("engine.devices.cuda.experts").tiled_part
    return partial(tiled_part, dtype=dtype, plain=config.deterministic)


def fault_of_options(config: ServeConfig, device: torch.device, dtype: torch.dtype) -> str | None:
    """Return why `--deterministic` can't be kept on a GPU, whatever the model; None if it can."""
    if config.serves_adapters and config.compile != "auto":
        how = f"with --compile {config.compile} torch's operators add adapters"
        return f"{how}, whose sums depend on the batch"
    name = config.attention_backend
    if name != "auto":
        if fault := backend_fault(name, device, dtype):
            return fault
        if not backend_of(name).deterministic:
            return f"with --attention-backend {name} sums depend on the batch"
    return backend_fault("triton", device, dtype)


def fault_of_weights(model: PreTrainedModel, config: ServeConfig) -> str | None:
    """Return why a model's products can't all be in tiles; None if all weights are those of linear layers, of
    experts, or of others by which our decoder multiplies.
    """
    by_decoder = _weights_of_decoder(model, config)
    for path, module in model.named_modules():
        if type(module) in _TILED or isinstance(module, nn.Embedding | nn.Conv1d) or are_experts(module):
            continue
        for name, weight in module.named_parameters(recurse=False):
            if weight.squeeze().dim() > 1 and name != _STATES and id(weight) not in by_decoder:
                return (
                    f"{path}.{name}, of {type(module).__name__}, is no linear layer's weight, and torch's "
                    "products with it depend on the batch"
                )
    return None


def _weights_of_decoder(model: PreTrainedModel, config: ServeConfig) -> set[int]:
    """Return the ids of routers' weights and of those of single heads, if the CUDA decoder runs the model."""
    try:
        program = describe(model)
    except UndescribedModelError:
        return set()
    unfit = importlib.import_module("engine.devices.cuda.decoder").unfit
    if config.compile != "auto" or unfit(program, with_adapters=config.serves_adapters) is not None:
        return set()
    found = {id(layer.experts.router) for layer in program.layers if layer.experts is not None}
    latents = [each for layer in program.layers for each in layer.mixers if isinstance(each, LatentAttention)]
    return found | {id(side.weight) for each in latents for side in (each.to_latent, each.to_value)}
