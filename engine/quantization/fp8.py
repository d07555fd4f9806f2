"""FP8 E4M3 with a scale per 128 x 128 weights, as in DeepSeek-V3 and Qwen3, or per layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from engine.quantization.stored import (
    StoredLayer,
    block_scales,
    block_shape,
    choice,
    float8_codes,
    row_scales,
)
from engine.quantization.weight import CodeFormat, QuantizedWeight

_SCALES = ("weight_scale_inv", "weight_scale")
"""Names of the scales; despite `_inv`, both kinds multiply the codes."""


@dataclass(frozen=True)
class Fp8:
    block: tuple[int, int] | None = (128, 128)
    """Outputs and inputs of a block with one scale; None if the layer has one scale."""

    @classmethod
    def parse(cls, config: Mapping[str, Any]) -> Fp8:
        choice(config, "fmt", ("e4m3", None))
        field = "weight_block_size"
        return cls(None if config.get(field) is None else block_shape(config, field))

    def config(self, unquantized: Sequence[str] = ()) -> dict[str, Any]:
        return {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": None if self.block is None else list(self.block),
            "modules_to_not_convert": list(unquantized) or None,
        }

    def is_stored(self, tensors: Mapping[str, Tensor]) -> bool:
        return is_float8(tensors) or not tensors.keys().isdisjoint(_SCALES)

    def shape(self, tensors: Mapping[str, Tensor]) -> tuple[int, int] | None:
        if "weight" not in tensors:
            return None
        rows, columns = tensors["weight"].shape
        return rows, columns

    def read(self, layer: StoredLayer) -> QuantizedWeight:
        suffix = next((name for name in _SCALES if name in layer.tensors), _SCALES[0])
        codes = float8_codes(layer)
        if self.block is None:
            return QuantizedWeight(CodeFormat.FP8, codes, row_scales(layer, suffix))
        return QuantizedWeight(CodeFormat.FP8, codes, block_scales(layer, suffix, self.block))

    def write(self, weight: QuantizedWeight) -> dict[str, Tensor]:
        """Return a weight's tensors. Its scales must be equal within each block."""
        assert weight.format is CodeFormat.FP8
        rows, columns = self.block or weight.codes.shape
        scales = weight.scales[::rows, :: max(1, columns // weight.group_size)]
        return {
            "weight": weight.codes,
            "weight_scale_inv": scales.contiguous() if self.block else scales.reshape(()).clone(),
        }


def is_float8(tensors: Mapping[str, Tensor]) -> bool:
    return "weight" in tensors and tensors["weight"].dtype is torch.float8_e4m3fn
