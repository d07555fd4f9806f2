"""The published layouts of quantized checkpoints, by the `quant_method` of their `quantization_config`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor

from engine.errors import UnsupportedModelError
from engine.quantization import mxfp4
from engine.quantization.awq import Awq
from engine.quantization.compressed_tensors import CompressedTensors, Scheme
from engine.quantization.fp8 import Fp8
from engine.quantization.gptq import Gptq
from engine.quantization.stored import StoredLayer
from engine.quantization.weight import QuantizedWeight


class Layout(Protocol):
    """How a checkpoint stores its quantized linear layers."""

    def config(self, unquantized: Sequence[str] = ()) -> dict[str, Any]:
        """The `quantization_config` of config.json. Linear layers `unquantized` were left as they were."""

    def is_stored(self, tensors: Mapping[str, Tensor]) -> bool:
        """Whether these are of a quantized layer. Names are without the layer's."""

    def shape(self, tensors: Mapping[str, Tensor]) -> tuple[int, int] | None:
        """Outputs and inputs of the layer that these are of; None if the tensor that tells is missing."""

    def read(self, layer: StoredLayer) -> QuantizedWeight:
        """Raises UnsupportedModelError, naming a tensor."""

    def write(self, weight: QuantizedWeight) -> dict[str, Tensor]:
        """The layer's tensors, without its bias; names are without the layer's."""


_PARSE: dict[Any, Callable[[Mapping[str, Any]], Layout]] = {
    "awq": Awq.parse,
    "gptq": Gptq.parse,
    "compressed-tensors": CompressedTensors.parse,
    "fp8": Fp8.parse,
}


def parse_layout(config: Mapping[str, Any]) -> Layout:
    """Return the layout of a `quantization_config`. Raises UnsupportedModelError, naming the field."""
    method = config.get("quant_method")
    if method not in _PARSE:
        known = ", ".join((*_PARSE, mxfp4.METHOD))
        raise UnsupportedModelError(f"quantization_config: quant_method is {method!r}, not one of {known}")
    return _PARSE[method](config)


def int8_layout() -> Layout:
    """int8 with a scale for each output, by inputs of int8."""
    return CompressedTensors.of(Scheme("int-quantized", rounds_inputs=True))


def fp8_layout() -> Layout:
    """FP8 E4M3 with a scale for each output."""
    return CompressedTensors.of(Scheme("float-quantized"))
