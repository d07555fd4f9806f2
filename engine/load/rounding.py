"""The rounding of a loaded model's linear layers: `--quantization` and `--quantize-lm-head`. Nothing is
calibrated.
"""

from __future__ import annotations

import logging

from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from engine.linear.packed import plain_weight
from engine.linear.quantized import GROUPS, QuantizedLinear, group_size, round_to_nearest
from engine.model.families import is_never_rounded
from engine.quantization.weight import CodeFormat
from protocol.errors import ConfigError

logger = logging.getLogger("tandem.engine")


def round_linears(model: PreTrainedModel, format: CodeFormat) -> None:
    """Quantize the model's linear layers except its head. Raises ConfigError if the format fits no layer."""
    try:
        round_layers(model, format, model.get_output_embeddings())
    except ValueError as error:
        raise ConfigError(f"--quantization: {error}") from error
    fused = [each for name, each in model.named_parameters() if ".experts." in name and each.ndim == 3]
    if fused:
        num_bytes = sum(each.nbytes for each in fused)
        logger.warning("--quantization: fused experts (%.1f MB) are not rounded", num_bytes / 1e6)


def round_layers(model: nn.Module, format: CodeFormat, kept: nn.Module | None = None) -> None:
    """Quantize the linear layers except `kept` and those that are never rounded, freeing each weight before
    the next layer.

    Layers whose inputs are no multiple of a group stay unchanged. Raises ValueError if no layer fits.
    """
    linears = {path: each for path, each in model.named_modules() if type(each) in (nn.Linear, Conv1D)}
    paths = [p for p, each in linears.items() if each is not kept and not is_never_rounded(p)]
    count = 0
    for path in paths:
        linear = model.get_submodule(path)
        weight = plain_weight(linear).detach()
        group = group_size(format, weight.shape[1])
        if group is not None:
            quantized = round_to_nearest(weight, format, group)
            model.set_submodule(path, QuantizedLinear(quantized, linear.bias))
            count += 1
    if not count:
        raise ValueError(
            f"{format.value} fits none of the model's {len(paths)} linear layers: "
            f"their inputs would have to be a multiple of {GROUPS[format][-1]}"
        )


def round_head(model: PreTrainedModel) -> None:
    """Quantize the output head to int8. Embeddings tied to it keep their weight.

    Raises ConfigError if the head is not a linear layer, or is quantized already.
    """
    head = model.get_output_embeddings()
    if isinstance(head, QuantizedLinear):
        raise ConfigError("--quantize-lm-head: the model's head is already quantized: remove this option")
    path = next((path for path, module in model.named_modules() if module is head), None)
    if path is None or type(head) is not nn.Linear:
        raise ConfigError(f"--quantize-lm-head: {model.config.model_type}'s head is not a linear layer")
    weight = head.weight.detach()
    quantized = round_to_nearest(weight, CodeFormat.INT8, weight.shape[1])
    model.set_submodule(path, QuantizedLinear(quantized, head.bias))
