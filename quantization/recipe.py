"""What a model is quantized to: the method's options, and which layers they fit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from torch import nn

from engine.quantization.awq import Awq
from engine.quantization.checkpoint import Layout, fp8_layout, int8_layout
from engine.quantization.gptq import Gptq
from protocol.errors import ConfigError

Method = Literal["awq", "gptq", "int8", "fp8"]

GROUP_SIZES = (32, 64, 128)
_BITS: Mapping[str, tuple[int, ...]] = {"awq": (4,), "gptq": (4, 8), "int8": (8,), "fp8": (8,)}
_OUTPUTS_OF_A_WORD = 8
"""What AWQ packs along the outputs, as both do with zero points: so many codes of 4 bits."""


@dataclass(frozen=True)
class Recipe:
    """`group_size` None: a scale for each output channel."""

    method: Method
    bits: int
    group_size: int | None
    desc_act: bool = False

    @classmethod
    def choose(cls, method: Method, bits: int | None, group_size: int | None, desc_act: bool) -> Recipe:
        """None is the method's default. Raises `ConfigError` that names the option."""
        allowed = _BITS[method]
        if bits is not None and bits not in allowed:
            raise ConfigError(f"--bits: {method} has {_either(allowed)} bits, not {bits}")
        if desc_act and method != "gptq":
            raise ConfigError(f"--desc-act: is for --method gptq, not {method}")
        if method in ("int8", "fp8"):
            if group_size is not None:
                raise ConfigError(f"--group-size: {method} has a scale for each output channel and no groups")
        elif group_size is None:
            group_size = 128
        elif group_size not in GROUP_SIZES:
            raise ConfigError(f"--group-size: {group_size} is not {_either(GROUP_SIZES)}")
        return cls(method, bits or allowed[0], group_size, desc_act)

    @property
    def calibrates(self) -> bool:
        """Whether it looks at activations. The others round to nearest."""
        return self.group_size is not None

    def layout(self) -> Layout:
        """How the checkpoint stores it."""
        if self.group_size is None:
            return int8_layout() if self.method == "int8" else fp8_layout()
        if self.method == "awq":
            return Awq(self.group_size)
        return Gptq(self.bits, self.group_size, self.desc_act)

    def check(self, layers: Mapping[str, nn.Linear]) -> None:
        """Raises `ConfigError` that names the first layer that does not fit."""
        if not layers:
            raise ConfigError("--model: its decoder blocks have no linear layers (nn.Linear) to quantize")
        if self.group_size is None:
            return
        for name, layer in layers.items():
            if layer.in_features % self.group_size:
                raise ConfigError(
                    f"--group-size: {self.group_size} does not divide the {layer.in_features} inputs of "
                    f"{name}"
                )
            if layer.out_features % _OUTPUTS_OF_A_WORD:
                raise ConfigError(
                    f"--method: {self.method} packs {_OUTPUTS_OF_A_WORD} outputs in a word, which does not "
                    f"divide the {layer.out_features} of {name}"
                )


def _either(choices: tuple[int, ...]) -> str:
    return " or ".join(str(choice) for choice in choices)
