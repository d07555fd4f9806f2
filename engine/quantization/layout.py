"""The layout of a quantized checkpoint, as the `quantization_config` of its config.json describes it."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from engine.quantization.formats import FORMATS, MXFP4_METHOD, Scheme
from engine.quantization.weight import GROUP_SIZES, QuantizedWeight, StoredLayer, block_shape, choice
from protocol.errors import UnsupportedModelError

logger = logging.getLogger("tandem.engine")

_SUFFIXES = ("qweight", "qzeros", "scales", "g_idx", "weight_packed", "weight_scale", "weight_scale_inv")
"""Tensors that only quantized layers have."""
_CODES = (torch.int8, torch.float8_e4m3fn)
_WHOLE_ROW = -1
"""The group size that stands for one scale for each output."""
_VERSIONS = {"gptq": 1, "gptq_v2": 2}


@dataclass(frozen=True)
class Layout:
    """The schemes of a checkpoint's linear layers, each with its targets: names or classes of layers, or
    `re:` and a pattern of names.
    """

    schemes: tuple[tuple[tuple[str, ...], Scheme], ...]

    @classmethod
    def of(cls, scheme: Scheme) -> Layout:
        """Return a layout that stores every linear layer by `scheme`."""
        return cls(((("Linear",), scheme),))

    def is_stored(self, tensors: Mapping[str, Tensor]) -> bool:
        """Return whether a layer with these tensors, named by suffix, is quantized."""
        is_plain = any(scheme.format not in ("awq", "gptq") for _, scheme in self.schemes)
        is_coded = is_plain and "weight" in tensors and tensors["weight"].dtype in _CODES
        return is_coded or not tensors.keys().isdisjoint(_SUFFIXES)

    def shape(self, tensors: Mapping[str, Tensor]) -> tuple[int, int] | None:
        """Return the layer's outputs and inputs, or None if the tensor that shows them is missing."""
        scheme = self.schemes[0][1]
        if "weight_shape" in tensors:
            rows, columns = tensors["weight_shape"].tolist()
        elif "weight" in tensors:
            rows, columns = tensors["weight"].shape
        elif "weight_packed" in tensors:
            rows, octets = tensors["weight_packed"].shape
            columns = 2 * octets
        elif "qweight" in tensors:
            height, width = tensors["qweight"].shape
            is_awq, per_word = scheme.format == "awq", 32 // scheme.bits
            rows, columns = (width * per_word, height) if is_awq else (width, height * per_word)
        else:
            return None
        return rows, columns

    def read(self, layer: StoredLayer) -> QuantizedWeight:
        """Return the layer's weight. Raises UnsupportedModelError, naming a tensor."""
        scheme = self._scheme(layer.name)
        weight = FORMATS[scheme.format].read(layer, scheme)
        return replace(weight, input_group=layer.in_features) if scheme.rounds_inputs else weight

    def write(self, weight: QuantizedWeight) -> dict[str, Tensor]:
        """Return a layer's tensors in the first scheme, by suffix and without its bias."""
        scheme = self.schemes[0][1]
        write = FORMATS[scheme.format].write
        assert write is not None
        return write(weight, scheme)

    def config(self, unquantized: Sequence[str] = ()) -> dict[str, Any]:
        """Return the `quantization_config` for the first scheme. The layers `unquantized` are excluded."""
        scheme = self.schemes[0][1]
        if scheme.format in ("int-quantized", "float-quantized"):
            return _compressed_config(scheme) | {"ignore": list(unquantized)}
        own = (
            {"zero_point": True, "version": "gemm"}
            if scheme.format == "awq"
            else {
                "desc_act": scheme.desc_act,
                "sym": True,
                "checkpoint_format": "gptq",
                "pack_dtype": "int32",
            }
        )
        return {
            "quant_method": scheme.format,
            "bits": scheme.bits,
            "group_size": scheme.group_size or _WHOLE_ROW,
            **own,
            "modules_to_not_convert": list(unquantized) or None,
        }

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


def _compressed_config(scheme: Scheme) -> dict[str, Any]:
    """Return compressed-tensors' configuration. FP8 weights get FP8 inputs, which other engines need."""
    kind = "int" if scheme.format == "int-quantized" else "float"
    of_codes = {"num_bits": 8, "type": kind, "symmetric": True}
    strategy = "group" if scheme.group_size else "channel"
    inputs = of_codes | {"strategy": "token", "dynamic": True}
    group = {
        "targets": ["Linear"],
        "weights": of_codes | {"strategy": strategy, "group_size": scheme.group_size, "dynamic": False},
        "input_activations": inputs if scheme.rounds_inputs or kind == "float" else None,
        "output_activations": None,
        "format": scheme.format,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": scheme.format,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
    }


def parse_layout(config: Mapping[str, Any]) -> Layout:
    """Return the layout of a `quantization_config`. Raises UnsupportedModelError, naming the field."""
    method = config.get("quant_method")
    if method not in _PARSE:
        known = ", ".join((*_PARSE, MXFP4_METHOD))
        raise UnsupportedModelError(f"quantization_config: quant_method is {method!r}, not one of {known}")
    return _PARSE[method](config)


def _parse_awq(config: Mapping[str, Any]) -> Layout:
    choice(config, "version", ("gemm", "GEMM"), "gemm")
    choice(config, "zero_point", (True,), True)
    return Layout.of(Scheme("awq", choice(config, "bits", FORMATS["awq"].bits), _group_size(config)))


def _parse_gptq(config: Mapping[str, Any]) -> Layout:
    bits = choice(config, "bits", FORMATS["gptq"].bits)
    field = "checkpoint_format" if "checkpoint_format" in config else "format"
    version = _VERSIONS[choice(config, field, tuple(_VERSIONS), "gptq")]
    choice(config, "pack_dtype", ("int32",), "int32")
    special = [name for name in config.get("dynamic") or () if not name.startswith("-:")]
    if special:
        raise UnsupportedModelError(
            f"quantization_config: dynamic has options of its own for {special[0]!r}: not supported"
        )
    desc_act = choice(config, "desc_act", (True, False), False)
    return Layout.of(Scheme("gptq", bits, _group_size(config), desc_act=desc_act, version=version))


def _group_size(config: Mapping[str, Any]) -> int | None:
    size: int = choice(config, "group_size", (*GROUP_SIZES, _WHOLE_ROW))
    return None if size == _WHOLE_ROW else size


def _parse_fp8(config: Mapping[str, Any]) -> Layout:
    """Parse FP8 E4M3 with a scale per block of weights, as in DeepSeek-V3 and Qwen3, or per layer."""
    choice(config, "fmt", ("e4m3", None))
    field = "weight_block_size"
    block = None if config.get(field) is None else block_shape(config, field)
    return Layout.of(Scheme("float-quantized", block=block))


def _parse_compressed_tensors(config: Mapping[str, Any]) -> Layout:
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
        scheme = _parse_scheme(str(format), group["weights"], inputs)
        schemes.append((tuple(group.get("targets", ())), scheme))
    if config.get("kv_cache_scheme"):
        logger.warning("quantization_config: kv_cache_scheme is ignored")
    return Layout(tuple(schemes))


def _parse_scheme(format: str, weights: Mapping[str, Any], inputs: Mapping[str, Any]) -> Scheme:
    """Parse the configuration of a group's `weights` and `inputs`. Inputs may be rounded to int8 if a row has
    its own scale; a fixed scale becomes one. Other inputs keep their precision.
    """
    kind = choice(weights, "type", ("int", "float"), "int")
    if format == "naive-quantized":
        format = f"{kind}-quantized"
    known = {name: each for name, each in FORMATS.items() if each.strategies}
    if format not in known:
        raise UnsupportedModelError(
            f"quantization_config: format is {format!r}, not one of {', '.join(known)}"
        )
    bits = choice(weights, "num_bits", known[format].bits)
    has_zeros = format == "pack-quantized" and bits == 4
    symmetric = choice(weights, "symmetric", (True, False) if has_zeros else (True,), True)
    strategy = choice(weights, "strategy", known[format].strategies)
    are_int8 = (inputs.get("num_bits"), inputs.get("type", "int"), inputs.get("symmetric", True))
    return Scheme(
        format,
        bits,
        choice(weights, "group_size", GROUP_SIZES) if strategy == "group" else None,
        symmetric,
        block_shape(weights, "block_structure") if strategy == "block" else None,
        rounds_inputs=format in ("pack-quantized", "int-quantized") and are_int8 == (8, "int", True),
    )


_PARSE = {
    "awq": _parse_awq,
    "gptq": _parse_gptq,
    "compressed-tensors": _parse_compressed_tensors,
    "fp8": _parse_fp8,
}
