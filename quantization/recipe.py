"""Quantization methods with their options, checked against the layers of a model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
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
"""The number of 4-bit codes that a 32-bit word holds. AWQ packs weights along the outputs; AWQ and GPTQ pack
their zero points along them.
"""


@dataclass(frozen=True)
class Recipe:
    """A method with its options. If `group_size` is None, there is one scale for each output channel."""

    method: Method
    bits: int
    group_size: int | None
    desc_act: bool = False

    @classmethod
    def choose(
        cls,
        method: Method,
        bits: int | None,
        group_size: int | None,
        desc_act: bool,
        layers: Mapping[str, nn.Linear],
    ) -> Recipe:
        """Fill in the method's defaults for options that are None. The default of `group_size` is the
        largest that divides the inputs of all layers.

        `layers` may be on the meta device. Raises `ConfigError`, with a line for each fault of the layers.
        """
        faults = list(_layer_faults(method, layers))
        if calibrates(method):
            fitting = [size for size in GROUP_SIZES if _undivided(layers, size) is None]
            if group_size is None:
                group_size = max(fitting, default=None)
                if group_size is None:
                    faults.append(f"--method: {method} has groups, and {_misfit(layers, min(GROUP_SIZES))}")
            elif group_size in GROUP_SIZES and group_size not in fitting:
                others = f"; {_either(fitting)} divides those of all layers" if fitting else ""
                faults.append(f"--group-size: {_misfit(layers, group_size)}{others}")
        if faults:
            raise ConfigError("\n".join(faults))
        return cls(method, bits or _BITS[method][0], group_size, desc_act)

    @property
    def calibrates(self) -> bool:
        """Whether the method uses activations. The others round to nearest."""
        return calibrates(self.method)

    def layout(self) -> Layout:
        """Return the layout in which the checkpoint stores the weights."""
        if self.group_size is None:
            return int8_layout() if self.method == "int8" else fp8_layout()
        if self.method == "awq":
            return Awq(self.group_size)
        return Gptq(self.bits, self.group_size, self.desc_act)


def calibrates(method: Method) -> bool:
    return method in ("awq", "gptq")


def check_options(method: Method, bits: int | None, group_size: int | None, desc_act: bool) -> None:
    """Raise `ConfigError`, with a line for each option whose value the method does not support."""
    faults = list(_option_faults(method, bits, group_size, desc_act))
    if faults:
        raise ConfigError("\n".join(faults))


def _option_faults(method: Method, bits: int | None, group_size: int | None, desc_act: bool) -> Iterator[str]:
    if bits is not None and bits not in _BITS[method]:
        yield f"--bits: {method} has {_either(_BITS[method])} bits, not {bits}"
    if desc_act and method != "gptq":
        yield f"--desc-act: is for --method gptq, not {method}"
    if group_size is not None and not calibrates(method):
        yield f"--group-size: {method} has a scale for each output channel and no groups"
    elif group_size not in (None, *GROUP_SIZES):
        yield f"--group-size: {group_size} is not {_either(GROUP_SIZES)}"


def _layer_faults(method: Method, layers: Mapping[str, nn.Linear]) -> Iterator[str]:
    if not layers:
        yield "--model: its decoder blocks have no linear layers (nn.Linear) to quantize"
    if calibrates(method):
        for name, layer in layers.items():
            if layer.out_features % _OUTPUTS_OF_A_WORD:
                yield (
                    f"--method: {method} packs {_OUTPUTS_OF_A_WORD} outputs in a word, which does not divide "
                    f"the {layer.out_features} of {name}"
                )
                return


def _undivided(layers: Mapping[str, nn.Linear], group_size: int) -> str | None:
    """Return the first layer whose number of inputs is not a multiple of the group size."""
    return next((name for name, layer in layers.items() if layer.in_features % group_size), None)


def _misfit(layers: Mapping[str, nn.Linear], group_size: int) -> str:
    name = _undivided(layers, group_size)
    assert name is not None
    return f"{group_size} does not divide the {layers[name].in_features} inputs of {name}"


def _either(choices: Sequence[int]) -> str:
    return " or ".join(str(choice) for choice in choices)
