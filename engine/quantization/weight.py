"""A linear layer's quantized weights, whatever checkpoint or rounding they come from; and the tensors that a
checkpoint stores for one, with the checks that all layouts share.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from protocol.errors import UnsupportedModelError


class CodeFormat(Enum):
    """The number format of a weight's codes, in the names of `--quantization`."""

    INT8 = "int8"  # -128 to 127
    INT4 = "int4"  # 0 to 15; zero is 8 unless there are zero points
    FP8 = "fp8"  # float8_e4m3fn
    MXFP4 = "mxfp4"  # the sixteen values of E2M1, by their index


E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""The values of E2M1 by code: OCP Microscaling Formats, section 5.3.3."""

INT4_ZERO = 8


def same_order(one: Tensor | None, other: Tensor | None) -> bool:
    """Return whether two orders of a weight's inputs are equal; None is the inputs' own order."""
    if one is None or other is None:
        return one is other
    return torch.equal(one, other)


@dataclass(frozen=True)
class QuantizedWeight:
    """A linear layer's codes [out_features, in_features], with their scales.

    `codes` is int8 for INT8, uint8 for INT4 and MXFP4, float8_e4m3fn for FP8. `scales`, and `zeros` for zero
    points (INT8 and INT4 only), are float32 [out_features, in_features / group_size]; MXFP4's scales are
    powers of two. With `permutation`, int64 [in_features], column k of the codes multiplies input
    `permutation[k]`: GPTQ's `desc_act`, sorted by group. A nonzero `input_group` (INT8 and INT4 only) is a
    number of adjacent inputs that may be rounded together to int8, in units of their largest magnitude / 127.
    """

    format: CodeFormat
    codes: Tensor
    scales: Tensor
    zeros: Tensor | None = None
    permutation: Tensor | None = None
    input_group: int = field(default=0, kw_only=True)

    @property
    def group_size(self) -> int:
        return self.codes.shape[1] // self.scales.shape[1]

    def describe(self) -> str:
        """Return the format and the number of weights that share a scale."""
        shared = f"in groups of {self.group_size}" if self.scales.shape[1] > 1 else "with a scale an output"
        return f"{self.format.value} {shared}{' and zero points' if self.zeros is not None else ''}"

    def dequantized(self) -> Tensor:
        """Return the weight in float32 [out_features, in_features], with columns in the inputs' order."""
        values = self._values().unflatten(1, (-1, self.group_size))
        if self.zeros is not None:
            values = values - self.zeros.unsqueeze(-1)
        weight = (values * self.scales.unsqueeze(-1)).flatten(1)
        if self.permutation is None:
            return weight
        ordered = torch.empty_like(weight)
        ordered[:, self.permutation] = weight
        return ordered

    def _values(self) -> Tensor:
        if self.format is CodeFormat.MXFP4:
            return torch.tensor(E2M1_VALUES, device=self.codes.device)[self.codes.long()]
        values = self.codes.to(torch.float32)
        if self.format is CodeFormat.INT4 and self.zeros is None:
            return values - INT4_ZERO
        return values


GROUP_SIZES = (32, 64, 128)
"""Group sizes: numbers of inputs that share a scale."""

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float8_e8m0fnu)


@dataclass(frozen=True)
class StoredLayer:
    """A linear layer's stored tensors, by their names in the checkpoint without `name` and a dot."""

    name: str
    out_features: int
    in_features: int
    tensors: Mapping[str, Tensor]

    def take(self, suffix: str, dtypes: tuple[torch.dtype, ...], *shapes: tuple[int, ...]) -> Tensor:
        """Return a tensor. Raises UnsupportedModelError if it is missing, or its shape or dtype is wrong."""
        tensor = self.tensors.get(suffix)
        if tensor is None:
            raise self.wrong(suffix, "is missing")
        if tensor.dtype not in dtypes:
            allowed = " or ".join(dtype_name(dtype) for dtype in dtypes)
            raise self.wrong(suffix, f"is {dtype_name(tensor.dtype)}, not {allowed}")
        if tuple(tensor.shape) not in shapes:
            allowed = " or ".join(str(list(shape)) for shape in dict.fromkeys(shapes))
            raise self.wrong(suffix, f"has shape {list(tensor.shape)}, not {allowed}")
        return tensor

    def scales(self, suffix: str, *shapes: tuple[int, ...]) -> Tensor:
        """Return finite scales as float32. Raises UnsupportedModelError."""
        scales = self.take(suffix, FLOATS, *shapes).to(torch.float32)
        if not scales.isfinite().all():
            raise self.wrong(suffix, f"has {int((~scales.isfinite()).sum())} scales that are NaN or infinite")
        return scales

    def group_size(self, configured: int) -> int:
        """Return a group's size. Raises UnsupportedModelError if groups of this size do not fill a row."""
        if self.in_features % configured:
            raise UnsupportedModelError(
                f"{self.name}: {self.in_features} inputs are no multiple of the group size {configured}"
            )
        return configured

    def wrong(self, suffix: str, what: str) -> UnsupportedModelError:
        return UnsupportedModelError(f"{self.name}.{suffix}: {what}")


@dataclass
class StoredWeights:
    """A checkpoint's weights, whatever container and layout they come from.

    `plain` is by the model's parameter, with a `placeholder` for each quantized linear layer. `linears` is by
    the model's linear layer. `fused` holds the parts of the model's fused tensors, such as experts, by their
    published names: `{experts}.{number}.{layer}`.
    """

    plain: dict[str, Tensor] = field(default_factory=dict)
    linears: dict[str, QuantizedWeight] = field(default_factory=dict)
    fused: dict[str, QuantizedWeight] = field(default_factory=dict)


def placeholder(weight: Tensor) -> Tensor:
    """Return a tensor of the weight's shape and dtype that takes no memory."""
    return torch.zeros((), dtype=weight.dtype).expand(weight.shape)


def order_by_group(layer: StoredLayer, suffix: str, groups: int, *, is_needed: bool = False) -> Tensor | None:
    """Return the inputs sorted by their groups, int64 [in_features], or None if they are sorted already: the
    groups are in order or all -1, or the tensor is missing and not needed.
    """
    stored = layer.tensors.get(suffix)
    if not is_needed and (stored is None or (stored == -1).all()):
        return None
    group_of = layer.take(suffix, (torch.int32, torch.int64), (layer.in_features,)).long()
    outside = group_of[(group_of < 0) | (group_of >= groups)]
    if len(outside):
        raise layer.wrong(suffix, f"has group {int(outside[0])}, not 0 to {groups - 1}")
    sizes = group_of.bincount(minlength=groups)
    unequal = sizes != layer.in_features // groups
    if unequal.any():
        group = int(unequal.nonzero()[0])
        raise layer.wrong(
            suffix, f"has {int(sizes[group])} inputs in group {group}, not {layer.in_features // groups}"
        )
    return None if (group_of.diff() >= 0).all() else group_of.argsort(stable=True)


def row_scales(layer: StoredLayer, suffix: str) -> Tensor:
    """Return one scale for each output, float32 [out_features, 1]. The layer may store a single one."""
    rows = layer.out_features
    scales = layer.scales(suffix, (rows, 1), (rows,), (1,), (), (1, 1))
    return scales.reshape(-1, 1).expand(rows, 1).contiguous()


def block_scales(layer: StoredLayer, suffix: str, block: tuple[int, int]) -> Tensor:
    """Return the scales of blocks of outputs and inputs, as float32 [out_features, groups]."""
    rows, columns = block
    shape = -(-layer.out_features // rows), -(-layer.in_features // columns)
    scales = layer.scales(suffix, shape).repeat_interleave(rows, dim=0)[: layer.out_features]
    size = layer.in_features if shape[1] == 1 else math.gcd(layer.in_features, columns)
    if size < GROUP_SIZES[0] < layer.in_features:
        raise layer.wrong(
            suffix,
            f"has blocks of {columns} inputs, {layer.in_features} in all: not a multiple of {GROUP_SIZES[0]}",
        )
    return scales[:, torch.arange(0, layer.in_features, size) // columns].contiguous()


def float8_codes(layer: StoredLayer) -> Tensor:
    """Return the layer's `weight`, finite float8_e4m3fn [out_features, in_features]."""
    codes = layer.take("weight", (torch.float8_e4m3fn,), (layer.out_features, layer.in_features))
    if ((codes.view(torch.uint8) & 127) == 127).any():
        raise layer.wrong("weight", "has values that are NaN")
    return codes


def block_shape(config: Mapping[str, Any], field: str) -> tuple[int, int]:
    """Return a block's outputs and inputs from a list or from "128x128". Raises UnsupportedModelError."""
    value = config.get(field)
    sizes = value.split("x") if isinstance(value, str) else value
    try:
        rows, columns = map(int, sizes or ())
    except (TypeError, ValueError):
        rows = columns = 0
    if min(rows, columns) < 1:
        raise UnsupportedModelError(f"quantization_config: {field} is {value!r}, not two sizes")
    return rows, columns


def choice(config: Mapping[str, Any], field: str, allowed: tuple[Any, ...], default: Any = None) -> Any:
    """Return a field of a `quantization_config`. Raises UnsupportedModelError if it is not `allowed`."""
    value = config.get(field, default)
    if value not in allowed:
        listed = ", ".join(map(str, allowed))
        raise UnsupportedModelError(f"quantization_config: {field} is {value!r}, not one of {listed}")
    return value


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
