"""Formats of linear layers in quantized checkpoints: how codes, scales and zero points are stored.

AWQ (Lin et al. 2023) packs eight outputs in a word, in the order 0, 2, 4, 6, 1, 3, 5, 7. GPTQ (Frantar et al.
2022) packs inputs, and its `g_idx` has each input's group. Version 1 of GPTQ's files stores zero points minus
one. compressed-tensors, which llm-compressor writes, has the other formats. Words are int32 with their first
code in the lowest bits. gpt-oss's own MXFP4 checkpoints have one tensor with the weights of all experts: E2M1
codes, with one power of two (E8M0) for each 32 inputs (OCP Microscaling Formats, 2023).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from engine.quantization.weight import (
    INT4_ZERO,
    CodeFormat,
    QuantizedWeight,
    StoredLayer,
    block_scales,
    float8_codes,
    order_by_group,
    row_scales,
)
from protocol.errors import UnsupportedModelError


def unpack(words: Tensor, bits: int) -> Tensor:
    """Return uint8 [rows, codes] from int32 [rows, words]."""
    octets = _compact(words).view(torch.uint8)
    if bits == 8:
        return octets
    return unpack_pairs(octets)


def pack(codes: Tensor, bits: int) -> Tensor:
    """Return int32 [rows, words] from uint8 [rows, codes]; zeros fill the last word."""
    missing = -codes.shape[1] % (32 // bits)
    codes = torch.nn.functional.pad(codes, (0, missing))
    octets = codes if bits == 8 else pack_pairs(codes)
    return _compact(octets).view(torch.int32)


def unpack_pairs(octets: Tensor) -> Tensor:
    """Return each uint8's lower and upper four bits as two columns."""
    return torch.stack([octets & 15, octets >> 4], dim=-1).flatten(-2)


def pack_pairs(codes: Tensor) -> Tensor:
    return codes[:, 0::2] | (codes[:, 1::2] << 4)


INT8_ZERO = 128
"""The zero point of 8-bit codes stored without a sign."""


def move_zero(codes: Tensor) -> Tensor:
    """Convert uint8 codes with zero point 128 to int8, and vice versa."""
    flipped = _compact(codes).view(torch.uint8) ^ INT8_ZERO
    return flipped if codes.dtype is torch.int8 else flipped.view(torch.int8)


E8M0_NAN = 255


def powers(exponents: Tensor) -> Tensor:
    """Return the float32 powers of two of E8M0 exponents with bias 127 (OCP Microscaling Formats, 2023)."""
    return torch.exp2(exponents.to(torch.float32) - 127)


def _compact(tensor: Tensor) -> Tensor:
    """Return a copy with the strides of its shape; `contiguous` keeps other strides where a size is 1."""
    return tensor.clone(memory_format=torch.contiguous_format)


@dataclass(frozen=True)
class Scheme:
    """The storage of some layers' weights; `format` is a key of `FORMATS`."""

    format: str
    bits: int = 8
    group_size: int | None = None
    """Number of inputs with one scale; None: one scale for each output or for the layer."""
    symmetric: bool = True
    block: tuple[int, int] | None = None
    """Outputs and inputs of a block with one scale."""
    rounds_inputs: bool = False
    desc_act: bool = False
    """Whether GPTQ has quantized inputs in another order than the layer's."""
    version: int = 1


def _read_awq(layer: StoredLayer, scheme: Scheme) -> QuantizedWeight:
    groups, width = _groups(layer, scheme), layer.out_features // 8
    codes = layer.take("qweight", (torch.int32,), (layer.in_features, width))
    zeros = layer.take("qzeros", (torch.int32,), (groups, width))
    scales = layer.scales("scales", (groups, layer.out_features)).T.contiguous()
    return _integers(4, _unpack_awq(codes), scales, _unpack_awq(zeros))


def _write_awq(weight: QuantizedWeight, scheme: Scheme) -> dict[str, Tensor]:
    """Return tensors with float16 scales. Outputs must be a multiple of 8."""
    assert weight.format is CodeFormat.INT4 and weight.permutation is None
    return {
        "qweight": _pack_awq(weight.codes),
        "qzeros": _pack_awq(_zeros_of(weight)),
        "scales": weight.scales.T.to(torch.float16).contiguous(),
    }


_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""Each output's place in AWQ's word of eight: the inverse of `_ORDER`."""


def _unpack_awq(stored: Tensor) -> Tensor:
    """Return uint8 [out_features, columns] from int32 [columns, out_features / 8]."""
    codes = unpack(stored, 4).view(len(stored), -1, 8)
    return codes[:, :, _PLACES].flatten(1).T.contiguous()


def _pack_awq(codes: Tensor) -> Tensor:
    ordered = codes.T.reshape(codes.shape[1], -1, 8)[:, :, _ORDER]
    return pack(ordered.flatten(1), 4)


_ONES = {4: 0x11111111, 8: 0x01010101}
"""A one in each code of a word. GPTQModel subtracts it from whole words, and so borrows across codes."""


def _read_gptq(layer: StoredLayer, scheme: Scheme) -> QuantizedWeight:
    groups, per_word = _groups(layer, scheme), 32 // scheme.bits
    height, width = -(-layer.in_features // per_word), -(-layer.out_features // per_word)
    stored = layer.take("qweight", (torch.int32,), (height, layer.out_features))
    stored_zeros = layer.take("qzeros", (torch.int32,), (groups, width))
    if scheme.version == 1:
        stored_zeros = stored_zeros + _ONES[scheme.bits]
    codes = unpack(stored.T, scheme.bits)[:, : layer.in_features]
    zeros = unpack(stored_zeros, scheme.bits)[:, : layer.out_features].T
    scales = layer.scales("scales", (groups, layer.out_features)).T.contiguous()
    if scheme.bits == 8 and (zeros != INT8_ZERO).any():
        raise layer.wrong("qzeros", f"has zero points of 8 bits other than {INT8_ZERO}: sym must be true")
    order = order_by_group(layer, "g_idx", groups, is_needed=scheme.desc_act)
    return _integers(scheme.bits, codes, scales, zeros, order)


def _write_gptq(weight: QuantizedWeight, scheme: Scheme) -> dict[str, Tensor]:
    """Return tensors of version 1 with float16 scales. Some of its readers read the zero point 0 as 16."""
    codes = weight.codes
    if weight.format is CodeFormat.INT8:
        codes = move_zero(codes)
    group_of = torch.arange(codes.shape[1], dtype=torch.int32) // weight.group_size
    if weight.permutation is not None:
        order = weight.permutation.argsort()
        codes, group_of = codes[:, order], group_of[order]
    return {
        "qweight": pack(codes, scheme.bits).T.contiguous(),
        "qzeros": pack(_zeros_of(weight).T, scheme.bits) - _ONES[scheme.bits],
        "scales": weight.scales.T.to(torch.float16).contiguous(),
        "g_idx": group_of,
    }


def _read_packed(layer: StoredLayer, scheme: Scheme) -> QuantizedWeight:
    rows, columns = layer.out_features, layer.in_features
    groups, per_word = _groups(layer, scheme), 32 // scheme.bits
    shape = layer.tensors.get("weight_shape")
    if shape is not None and shape.tolist() != [rows, columns]:
        raise layer.wrong("weight_shape", f"is {shape.tolist()}, not {[rows, columns]}")
    packed = layer.take("weight_packed", (torch.int32,), (rows, -(-columns // per_word)))
    codes = unpack(packed, scheme.bits)[:, :columns]
    scales = layer.scales("weight_scale", (rows, groups)).contiguous()
    zeros = None if scheme.symmetric else _packed_zeros(layer, groups)
    return _integers(scheme.bits, codes, scales, zeros, order_by_group(layer, "weight_g_idx", groups))


def _packed_zeros(layer: StoredLayer, groups: int) -> Tensor:
    """Return zero points [out_features, groups]. Older files store them unpacked: int8 from -8."""
    rows, suffix = layer.out_features, "weight_zero_point"
    if suffix in layer.tensors and layer.tensors[suffix].dtype is torch.int8:
        return layer.take(suffix, (torch.int8,), (rows, groups)) + INT4_ZERO
    packed = layer.take(suffix, (torch.int32,), (-(-rows // 8), groups))
    return unpack(packed.T, 4)[:, :rows].T


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
    scales = layer.scales("weight_scale", (rows, _groups(layer, scheme)))
    return QuantizedWeight(CodeFormat.INT8, codes, scales)


def _read_floats(layer: StoredLayer, scheme: Scheme) -> QuantizedWeight:
    """Read FP8. Scales multiply the codes, also those named `_inv` in DeepSeek-V3's own checkpoints."""
    suffix = "weight_scale_inv" if "weight_scale_inv" in layer.tensors else "weight_scale"
    codes = float8_codes(layer)
    if scheme.block is not None:
        return QuantizedWeight(CodeFormat.FP8, codes, block_scales(layer, suffix, scheme.block))
    return QuantizedWeight(CodeFormat.FP8, codes, row_scales(layer, suffix))


def _write_plain(weight: QuantizedWeight, scheme: Scheme) -> dict[str, Tensor]:
    assert scheme.block is None and weight.permutation is None
    return {"weight": weight.codes, "weight_scale": weight.scales}


def _read_mxfp4(layer: StoredLayer, scheme: Scheme) -> QuantizedWeight:
    rows, columns = layer.out_features, layer.in_features
    packed = layer.take("weight_packed", (torch.uint8,), (rows, columns // 2))
    exponents = layer.take("weight_scale", (torch.uint8,), (rows, _groups(layer, scheme)))
    if (exponents == E8M0_NAN).any():
        raise layer.wrong("weight_scale", "has scales that are NaN")
    return QuantizedWeight(CodeFormat.MXFP4, unpack_pairs(packed), powers(exponents))


def _groups(layer: StoredLayer, scheme: Scheme) -> int:
    return layer.in_features // layer.group_size(scheme.group_size or layer.in_features)


def _integers(
    bits: int, codes: Tensor, scales: Tensor, zeros: Tensor | None, order: Tensor | None = None
) -> QuantizedWeight:
    """Return the weight of unsigned codes [out, in] in the layer's order. Codes of 8 bits are around 128."""
    if order is not None:
        codes = codes[:, order]
    if bits == 8:
        return QuantizedWeight(CodeFormat.INT8, move_zero(codes), scales, None, order)
    if zeros is not None:
        zeros = None if (zeros == INT4_ZERO).all() else zeros.to(torch.float32).contiguous()
    return QuantizedWeight(CodeFormat.INT4, codes.contiguous(), scales, zeros, order)


def _zeros_of(weight: QuantizedWeight) -> Tensor:
    """Return the zero points of unsigned codes, uint8 [out, groups]."""
    usual = INT4_ZERO if weight.format is CodeFormat.INT4 else INT8_ZERO
    zeros = torch.full_like(weight.scales, usual) if weight.zeros is None else weight.zeros
    return zeros.to(torch.uint8)


class Format(NamedTuple):
    bits: tuple[int, ...]
    strategies: tuple[str, ...]
    """The names that compressed-tensors gives to the weights that share a scale."""
    read: Callable[[StoredLayer, Scheme], QuantizedWeight]
    write: Callable[[QuantizedWeight, Scheme], dict[str, Tensor]] | None = None


FORMATS = {
    "awq": Format((4,), (), _read_awq, _write_awq),
    "gptq": Format((4, 8), (), _read_gptq, _write_gptq),
    "pack-quantized": Format((4, 8), ("channel", "group"), _read_packed),
    "int-quantized": Format((8,), ("tensor", "channel", "group"), _read_ints, _write_plain),
    "float-quantized": Format((8,), ("tensor", "channel", "block"), _read_floats, _write_plain),
    "mxfp4-pack-quantized": Format((4,), ("group",), _read_mxfp4),
}


MXFP4_METHOD = "mxfp4"
"""The checkpoints' `quant_method` in `quantization_config`."""

BLOCKS, SCALES = "_blocks", "_scales"
_GROUP_BYTES = 16
"""Number of bytes of 32 codes; a byte's lower four bits come first."""


@dataclass(frozen=True)
class StackedWeights:
    """The weights of all experts: uint8 [experts, outputs, groups, 16] and [experts, outputs, groups]."""

    blocks: Tensor
    scales: Tensor
    device: torch.device | None = None
    """The device to which each expert's weights move when they are asked for."""

    def __iter__(self) -> Iterator[QuantizedWeight]:
        for blocks, scales in zip(self.blocks, self.scales, strict=True):
            codes = unpack_pairs(blocks.to(self.device).flatten(1))
            yield QuantizedWeight(CodeFormat.MXFP4, codes, powers(scales.to(self.device)))

    def to(self, device: torch.device) -> StackedWeights:
        return replace(self, device=device)


def split_mxfp4(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, StackedWeights]]:
    """Return the checkpoint without NAME_blocks and NAME_scales, and the weights made of these, by NAME."""
    rest = {name: tensor for name, tensor in tensors.items() if not name.endswith((BLOCKS, SCALES))}
    weights = {}
    for name, blocks in tensors.items():
        if name.endswith(BLOCKS):
            weight = name.removesuffix(BLOCKS)
            if weight + SCALES not in tensors:
                raise UnsupportedModelError(f"{weight}{SCALES}: is missing next to {name}")
            weights[weight] = StackedWeights(blocks, tensors[weight + SCALES])
            _check(weight, blocks, tensors[weight + SCALES])
    return rest, weights


def _check(name: str, blocks: Tensor, scales: Tensor) -> None:
    for suffix, tensor in ((BLOCKS, blocks), (SCALES, scales)):
        if tensor.dtype is not torch.uint8:
            raise UnsupportedModelError(f"{name}{suffix}: is {tensor.dtype}, not torch.uint8")
    if blocks.ndim != 4 or blocks.shape[-1] != _GROUP_BYTES:
        raise UnsupportedModelError(
            f"{name}{BLOCKS}: has shape {list(blocks.shape)}, not [experts, outputs, groups, {_GROUP_BYTES}]"
        )
    if scales.shape != blocks.shape[:-1]:
        raise UnsupportedModelError(
            f"{name}{SCALES}: has shape {list(scales.shape)}, not {list(blocks.shape[:-1])}"
        )
    if (scales == E8M0_NAN).any():
        raise UnsupportedModelError(f"{name}{SCALES}: has scales that are NaN")
