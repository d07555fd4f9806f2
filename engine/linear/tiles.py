"""Linear layers for our kernel on a GPU (`engine.cuda.products`)."""

from __future__ import annotations

import importlib

import torch
from torch import nn

from engine.attention.select import available_backends, select_backend


def tile_fault(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why it can't be used: Triton can't."""
    return None if "triton" in available_backends(device, dtype) else select_backend(device, dtype)[1]


def tile_on_gpu(model: nn.Module, device: torch.device, dtype: torch.dtype, *, plain: bool = False) -> None:
    """Pack the model's quantized layers, and with `plain` all linear ones. Where that can't be, torch
    dequantizes layers in each step.
    """
    if tile_fault(device, dtype) is None:
        importlib.import_module("engine.cuda.products").tile_linears(model, dtype, plain=plain)
