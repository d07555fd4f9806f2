"""Rounds the weights of what drafts: `quantization` of `--speculative-config`."""

from __future__ import annotations

from torch import nn

from engine.devices.cuda.tiles import tile_on_gpu
from engine.devices.loaded_model import LoadedModel
from engine.linear.packed import kernel_fault
from engine.linear.packed_quantized import dequantize_linears, pack_quantized_linears
from engine.linear.rounding import round_layers
from engine.quantization.weight import CodeFormat
from protocol.errors import ConfigError

FIELD = "--speculative-config: quantization"


def round_draft(
    draft: nn.Module, format: CodeFormat, target: LoadedModel, kept: nn.Module | None = None
) -> None:
    """Its linear layers but the one to be `kept`, which run as the target does. Raises ConfigError where the
    format fits none of them.
    """
    try:
        round_layers(draft, format, kept)
    except ValueError as error:
        raise ConfigError(f"{FIELD}: {error}") from error
    if kernel_fault(target.device, target.dtype) is None:
        pack_quantized_linears(draft)
    elif target.device.type == "cpu":
        dequantize_linears(draft, target.dtype)  # torch would do so in every step
    else:
        tile_on_gpu(draft, target.device, target.dtype)
