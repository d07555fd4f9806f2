"""The layouts of compressed-tensors, which llm-compressor writes: a configuration for each group of layers.

The activations' configuration is ignored except for inputs rounded symmetrically to int8.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from engine.quantization import words
from engine.quantization.fp8 import is_float8
from engine.quantization.stored import (
    GROUP_SIZES,
    StoredLayer,
    block_scales,
    block_shape,
    choice,
    float8_codes,
    order_by_group,
    row_scales,
)
from engine.quantization.weight import CodeFormat, QuantizedWeight
from protocol.errors import UnsupportedModelError

logger = logging.getLogger("tandem.engine")

_MX_GROUP = 32
_INTEGERS = ("pack-quantized", "int-quantized")


@dataclass(frozen=True)
class Scheme:
    """The storage of some layers' weights; `format` is the library's name for it."""

    format: str
    bits: int = 8
    symmetric: bool = True
    group_size: int | None = None
    """Number of inputs with one scale; None: one scale for each output or for the layer."""
    block: tuple[int, int] | None = None
    rounds_inputs: bool = False

    @classmethod
    def parse(cls, format: str, weights: Mapping[str, Any], inputs: Mapping[str, Any]) -> Scheme:
        """Return the scheme of a group of layers from its `weights` and `inputs` configuration."""
        kind = choice(weights, "type", ("int", "float"), "int")
        if format == "naive-quantized":
            format = f"{kind}-quantized"
        if format not in _READ:
            raise UnsupportedModelError(
                f"quantization_config: format is {format!r}, not one of {', '.join(_READ)}"
            )
        bits = choice(weights, "num_bits", _BITS[format])
        symmetric = choice(
            weights, "symmetric", (True, False) if format == "pack-quantized" else (True,), True
        )
        strategy = choice(weights, "strategy", _STRATEGIES[format])
        rounds = format in _INTEGERS and _are_int8(inputs)
        if strategy == "block":
            return cls(format, bits, symmetric, None, block_shape(weights, "block_structure"))
        if strategy == "group":
            size = choice(weights, "group_size", GROUP_SIZES)
            return cls(format, bits, symmetric, size, rounds_inputs=rounds)
        return cls(format, bits, symmetric, rounds_inputs=rounds)

    def weights(self) -> dict[str, Any]:
        """Return the configuration that `parse` reads."""
        strategy = "block" if self.block else "group" if self.group_size else "channel"
        return {
            "num_bits": self.bits,
            "type": "int" if self.format in _INTEGERS else "float",
            "symmetric": self.symmetric,
            "strategy": strategy,
            "group_size": self.group_size,
            "block_structure": None if self.block is None else list(self.block),
            "dynamic": False,
        }


@dataclass(frozen=True)
class CompressedTensors:
    schemes: tuple[tuple[tuple[str, ...], Scheme], ...]
    """Targets (names or classes of layers, or `re:` and a pattern of names), with their scheme."""

    @classmethod
    def of(cls, scheme: Scheme) -> CompressedTensors:
        """Return a layout that stores every linear layer by `scheme`."""
        return cls(((("Linear",), scheme),))

    @classmethod
    def parse(cls, config: Mapping[str, Any]) -> CompressedTensors:
        for field in ("sparsity_config", "transform_config"):
            part = config.get(field) or {}
            if part and part.get("format") != "dense":
                raise UnsupportedModelError(f"quantization_config: {field} is not supported")
        groups = config.get("config_groups") or {}
        if not groups:
            raise UnsupportedModelError("quantization_config: config_groups is missing")
        schemes = []
        for name, group in groups.items():
            if not isinstance(group, Mapping) or not group.get("weights"):
                raise UnsupportedModelError(f"quantization_config: config_groups.{name} has no weights")
            format = group.get("format") or config.get("format")
            inputs = group.get("input_activations") or {}
            scheme = Scheme.parse(str(format), group["weights"], inputs)
            schemes.append((tuple(group.get("targets", ())), scheme))
        if config.get("kv_cache_scheme"):
            logger.warning("quantization_config: kv_cache_scheme is ignored")
        return cls(tuple(schemes))

    def config(self, unquantized: Sequence[str] = ()) -> dict[str, Any]:
        groups = {
            f"group_{number}": {
                "targets": list(targets),
                "weights": scheme.weights(),
                "input_activations": _activations(scheme),
                "output_activations": None,
                "format": scheme.format,
            }
            for number, (targets, scheme) in enumerate(self.schemes)
        }
        return {
            "quant_method": "compressed-tensors",
            "format": self.schemes[0][1].format,
            "quantization_status": "compressed",
            "config_groups": groups,
            "ignore": list(unquantized),
        }

    def is_stored(self, tensors: Mapping[str, Tensor]) -> bool:
        is_int8 = "weight" in tensors and tensors["weight"].dtype is torch.int8
        stored = not tensors.keys().isdisjoint(("weight_packed", "weight_scale"))
        return stored or is_int8 or is_float8(tensors)

    def shape(self, tensors: Mapping[str, Tensor]) -> tuple[int, int] | None:
        if "weight_shape" in tensors:
            rows, columns = tensors["weight_shape"].tolist()
        elif "weight" in tensors:
            rows, columns = tensors["weight"].shape
        elif "weight_packed" in tensors:
            rows, octets = tensors["weight_packed"].shape
            columns = 2 * octets
        else:
            return None
        return rows, columns

    def read(self, layer: StoredLayer) -> QuantizedWeight:
        scheme = self._scheme(layer.name)
        weight = _READ[scheme.format](layer, scheme)
        return replace(weight, input_group=layer.in_features) if scheme.rounds_inputs else weight

    def write(self, weight: QuantizedWeight) -> dict[str, Tensor]:
        """Return a weight's tensors in the first scheme."""
        scheme = self.schemes[0][1]
        return _WRITE[scheme.format](weight, scheme)

    def _scheme(self, name: str) -> Scheme:
        for fits in (_is_named, lambda target, _: target == "Linear"):
            for targets, scheme in self.schemes:
                if any(fits(target, name) for target in targets):
                    return scheme
        raise UnsupportedModelError(f"{name}: is quantized, but no target in config_groups fits it")


def _is_named(target: str, name: str) -> bool:
    if target.startswith("re:"):
        return re.match(target[3:], name) is not None
    return target == name


def _are_int8(inputs: Mapping[str, Any]) -> bool:
    """Return whether inputs are rounded to int8. A fixed scale becomes one for each row. Asymmetric inputs
    keep their precision.
    """
    kind = inputs.get("num_bits"), inputs.get("type", "int"), inputs.get("symmetric", True)
    return kind == (8, "int", True)


def _activations(scheme: Scheme) -> dict[str, Any] | None:
    """Return the inputs' configuration. FP8 weights get FP8 inputs: other engines need both in FP8."""
    if not (scheme.rounds_inputs or scheme.format == "float-quantized"):
        return None
    kind = scheme.weights()["type"]
    return {"num_bits": 8, "type": kind, "symmetric": True, "strategy": "token", "dynamic": True}


def _read_packed(layer: StoredLayer, scheme: Scheme) -> QuantizedWeight:
    rows, columns = layer.out_features, layer.in_features
    size = layer.group_size(scheme.group_size or columns)
    groups, per_word = columns // size, 32 // scheme.bits
    shape = layer.tensors.get("weight_shape")
    if shape is not None and shape.tolist() != [rows, columns]:
        raise layer.wrong("weight_shape", f"is {shape.tolist()}, not {[rows, columns]}")
    packed = layer.take("weight_packed", (torch.int32,), (rows, -(-columns // per_word)))
    codes = words.unpack(packed, scheme.bits)[:, :columns]
    scales = layer.scales("weight_scale", (rows, groups)).contiguous()
    permutation = _permutation(layer, groups)
    if permutation is not None:
        codes = codes[:, permutation]
    if scheme.bits == 8:
        return QuantizedWeight(CodeFormat.INT8, words.move_zero(codes), scales, None, permutation)
    zeros = None if scheme.symmetric else _packed_zeros(layer, groups)
    return QuantizedWeight(CodeFormat.INT4, codes.contiguous(), scales, zeros, permutation)


def _permutation(layer: StoredLayer, groups: int) -> Tensor | None:
    """Return the inputs sorted by group. None if they are in order: without the tensor, or all -1 in it."""
    group_of = layer.tensors.get("weight_g_idx")
    if group_of is None or (group_of == -1).all():
        return None
    return order_by_group(layer, "weight_g_idx", groups)


def _packed_zeros(layer: StoredLayer, groups: int) -> Tensor:
    """Return zero points, float32 [out_features, groups]. Older files store them unpacked: int8 from -8."""
    rows, suffix = layer.out_features, "weight_zero_point"
    if suffix in layer.tensors and layer.tensors[suffix].dtype is torch.int8:
        return layer.take(suffix, (torch.int8,), (rows, groups)).to(torch.float32) + 8
    packed = layer.take(suffix, (torch.int32,), (-(-rows // 8), groups))
    return words.unpack(packed.T, 4)[:, :rows].T.to(torch.float32).contiguous()


def _write_packed(weight: QuantizedWeight, scheme: Scheme) -> dict[str, Tensor]:
    assert weight.permutation is None
    codes = weight.codes if scheme.bits == 4 else words.move_zero(weight.codes)
    tensors = {
        "weight_packed": words.pack(codes, scheme.bits),
        "weight_scale": weight.scales,
        "weight_shape": torch.tensor(weight.codes.shape),
    }
    if not scheme.symmetric:
        zeros = weight.zeros if weight.zeros is not None else torch.full_like(weight.scales, 8)
        tensors["weight_zero_point"] = words.pack(zeros.T.to(torch.uint8), 4).T.contiguous()
    return tensors


def _read_ints(layer: StoredLayer, scheme: Scheme) -> QuantizedWeight:
    rows, columns = layer.out_features, layer.in_features
    codes = layer.take("weight", (torch.int8,), (rows, columns))
    zeros = layer.tensors.get("weight_zero_point")
    if zeros is not None and zeros.any():
        raise layer.wrong(
            "weight_zero_point", "has zero points of 8 bits other than 0: symmetric must be true"
        )
    if scheme.group_size is None:
        return QuantizedWeight(CodeFormat.INT8, codes, row_scales(layer, "weight_scale"))
    groups = columns // layer.group_size(scheme.group_size)
    return QuantizedWeight(CodeFormat.INT8, codes, layer.scales("weight_scale", (rows, groups)))


def _read_floats(layer: StoredLayer, scheme: Scheme) -> QuantizedWeight:
    codes = float8_codes(layer)
    if scheme.block is not None:
        return QuantizedWeight(CodeFormat.FP8, codes, block_scales(layer, "weight_scale", scheme.block))
    return QuantizedWeight(CodeFormat.FP8, codes, row_scales(layer, "weight_scale"))


def _write_plain(weight: QuantizedWeight, scheme: Scheme) -> dict[str, Tensor]:
    assert scheme.block is None and weight.permutation is None
    return {"weight": weight.codes, "weight_scale": weight.scales}


def _read_mxfp4(layer: StoredLayer, scheme: Scheme) -> QuantizedWeight:
    rows, columns = layer.out_features, layer.in_features
    groups = columns // layer.group_size(_MX_GROUP)
    packed = layer.take("weight_packed", (torch.uint8,), (rows, columns // 2))
    exponents = layer.take("weight_scale", (torch.uint8,), (rows, groups))
    if (exponents == words.E8M0_NAN).any():
        raise layer.wrong("weight_scale", "has scales that are NaN")
    return QuantizedWeight(CodeFormat.MXFP4, words.unpack_pairs(packed), words.powers(exponents))


def _write_mxfp4(weight: QuantizedWeight, scheme: Scheme) -> dict[str, Tensor]:
    """Return a weight's tensors. Its scales must be powers of two."""
    exponents = torch.log2(weight.scales).round() + 127
    return {"weight_packed": words.pack_pairs(weight.codes), "weight_scale": exponents.to(torch.uint8)}


_READ = {
    "pack-quantized": _read_packed,
    "int-quantized": _read_ints,
    "float-quantized": _read_floats,
    "mxfp4-pack-quantized": _read_mxfp4,
}
_WRITE = {
    "pack-quantized": _write_packed,
    "int-quantized": _write_plain,
    "float-quantized": _write_plain,
    "mxfp4-pack-quantized": _write_mxfp4,
}
_BITS = {
    "pack-quantized": (4, 8),
    "int-quantized": (8,),
    "float-quantized": (8,),
    "mxfp4-pack-quantized": (4,),
}
_STRATEGIES = {
    "pack-quantized": ("channel", "group"),
    "int-quantized": ("tensor", "channel", "group"),
    "float-quantized": ("tensor", "channel", "block"),
    "mxfp4-pack-quantized": ("group",),
}
