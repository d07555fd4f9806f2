"""The published layouts of quantized checkpoints, by the `quant_method` of their `quantization_config`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor

from engine.quantization import mxfp4
from engine.quantization.awq import Awq
from engine.quantization.compressed_tensors import CompressedTensors, Scheme
from engine.quantization.fp8 import Fp8
from engine.quantization.gptq import Gptq
from engine.quantization.stored import StoredLayer
from engine.quantization.weight import QuantizedWeight
from protocol.errors import UnsupportedModelError


class WeightLayout(Protocol):
    """The way in which a checkpoint stores its quantized linear layers."""

    def config(self, unquantized: Sequence[str] = ()) -> dict[str, Any]:
        """Return the `quantization_config` of config.json. The linear layers `unquantized` are excluded."""

    def is_stored(self, tensors: Mapping[str, Tensor]) -> bool:
        """Return whether a layer with these tensors, named by suffix, is quantized."""

    def shape(self, tensors: Mapping[str, Tensor]) -> tuple[int, int] | None:
        """Return the layer's outputs and inputs, or None if the tensor that shows them is missing."""

    def read(self, layer: StoredLayer) -> QuantizedWeight:
        """Return the layer's weight. Raises UnsupportedModelError, naming a tensor."""

    def write(self, weight: QuantizedWeight) -> dict[str, Tensor]:
        """Return the layer's tensors by suffix, without its bias."""


_PARSE: dict[Any, Callable[[Mapping[str, Any]], WeightLayout]] = {
    "awq": Awq.parse,
    "gptq": Gptq.parse,
    "compressed-tensors": CompressedTensors.parse,
    "fp8": Fp8.parse,
}


def parse_layout(config: Mapping[str, Any]) -> WeightLayout:
    """Return the layout of a `quantization_config`. Raises UnsupportedModelError, naming the field."""
    method = config.get("quant_method")
    if method not in _PARSE:
        known = ", ".join((*_PARSE, mxfp4.METHOD))
        raise UnsupportedModelError(f"quantization_config: quant_method is {method!r}, not one of {known}")
    return _PARSE[method](config)


def int8_layout() -> WeightLayout:
    """Return the layout of int8 weights with a scale for each output, multiplied by int8 inputs."""
    return CompressedTensors.of(Scheme("int-quantized", rounds_inputs=True))


def fp8_layout() -> WeightLayout:
    """Return the layout of FP8 E4M3 weights with a scale for each output."""
    return CompressedTensors.of(Scheme("float-quantized"))
