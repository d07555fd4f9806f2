"""Linear layers for our kernel on a GPU (`engine.cuda.products`)."""

from __future__ import annotations

import importlib

import torch
from torch import nn

from engine.attention.select import available_backends, select_backend


def tile_on_gpu(
    model: nn.Module, device: torch.device, dtype: torch.dtype, *, plain: bool = False
) -> str | None:
    """Pack the model's quantized layers, and with `plain` all linear ones. Where Triton can't be
    used it returns why: torch dequantizes layers in each step there.
    """
    if "triton" not in available_backends(device, dtype):
        return select_backend(device, dtype)[1]
    importlib.import_module("engine.cuda.products").tile_linears(model, dtype, plain=plain)
    return None
