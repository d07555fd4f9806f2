"""The blocks of GGUF tensors, and the quantized weights that hold the same values.

ggml's `ggml-common.h` defines the blocks' layouts. The package `gguf` dequantizes types that no
`QuantizedWeight` can hold.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize
from torch import Tensor

from checkpoints.gguf.reader import GgufTensor
from engine.quantization.formats import powers
from engine.quantization.weight import CodeFormat, QuantizedWeight

BLOCK = 32
"""Number of values that share a scale in the types that stay quantized."""
_VALUES_AT_ONCE = 1 << 18
"""Number of values that are dequantized at once: few, so that they stay in a core's cache."""


def quantized_weight(
    tensor: GgufTensor, device: torch.device = torch.device("cpu")
) -> QuantizedWeight | None:
    """Return the weight of a matrix [outputs, inputs] as stored, or None if no format holds its type."""
    read = STORED.get(tensor.type)
    if read is None or len(tensor.shape) != 2:
        return None
    size, parse = read
    return parse(torch.from_numpy(tensor.data).to(device).unflatten(1, (-1, size)))


def dequantized(tensor: GgufTensor, dtype: torch.dtype) -> Tensor:
    """Return the values of a tensor of any type."""
    values = torch.empty(tensor.shape, dtype=dtype)
    rows = values.view(len(tensor.data), -1)
    count = max(1, _VALUES_AT_ONCE // rows.shape[1])
    for start in range(0, len(rows), count):
        piece = replace(tensor, data=tensor.data[start : start + count])
        rows[start : start + count] = _in_float32(piece)
    return values


def _in_float32(tensor: GgufTensor) -> Tensor:
    """Return the values [rows, inputs]."""
    weight = quantized_weight(tensor) if tensor.type in _WITHOUT_MINIMA else None
    if weight is not None:
        return weight.dequantized()
    return torch.from_numpy(np.ascontiguousarray(dequantize(tensor.data, tensor.type)))


class _Block(NamedTuple):
    """A block of 32 codes after a float16 scale. The first 16 codes are the low halves of the bytes from
    `codes` on; the others, the high ones. Codes without a minimum have their zero point in the middle.
    """

    codes: int
    fifth_bits: int | None = None
    has_minimum: bool = False

    def read(self, blocks: Tensor) -> QuantizedWeight:
        codes = _nibbles(blocks[..., self.codes :])
        format = CodeFormat.INT4
        if self.fifth_bits is not None:
            codes |= _bits(blocks[..., self.fifth_bits : self.fifth_bits + 4]) << 4
            format, codes = CodeFormat.INT8, codes.to(torch.int8)
        if self.has_minimum:
            return _with_minimum(format, codes.flatten(1), _half(blocks, 0), _half(blocks, 2))
        codes = codes if format is CodeFormat.INT4 else codes - 16
        return QuantizedWeight(format, codes.flatten(1), _half(blocks, 0))


def _q8_0(blocks: Tensor) -> QuantizedWeight:
    """Read a float16 scale and 32 int8 codes."""
    codes = blocks[..., 2:].contiguous().view(torch.int8).flatten(1)
    return QuantizedWeight(CodeFormat.INT8, codes, _half(blocks, 0))


def _q4_k(blocks: Tensor) -> QuantizedWeight:
    """Read two float16 factors, six-bit scales and minima of eight groups, and 256 codes."""
    return _with_minimum(CodeFormat.INT4, _k_codes(blocks[..., 16:]).flatten(1), *_k_scales(blocks))


def _q5_k(blocks: Tensor) -> QuantizedWeight:
    """Read Q4_K with fifth bits: those of group g are bit g of the 32 bytes before the codes."""
    shifts = torch.arange(8, dtype=torch.uint8, device=blocks.device)
    fifth = (blocks[..., 16:48, None] >> shifts) & 1
    codes = _k_codes(blocks[..., 48:]) | (fifth.transpose(-1, -2).flatten(-2) << 4)
    return _with_minimum(CodeFormat.INT8, codes.to(torch.int8).flatten(1), *_k_scales(blocks))


def _mxfp4(blocks: Tensor) -> QuantizedWeight:
    """Read a power of two (E8M0) and 32 codes of E2M1."""
    return QuantizedWeight(CodeFormat.MXFP4, _nibbles(blocks[..., 1:]).flatten(1), powers(blocks[..., 0]))


STORED = {
    GGMLQuantizationType.Q4_0: (18, _Block(2).read),
    GGMLQuantizationType.Q4_1: (20, _Block(4, has_minimum=True).read),
    GGMLQuantizationType.Q5_0: (22, _Block(6, 2).read),
    GGMLQuantizationType.Q5_1: (24, _Block(8, 4, has_minimum=True).read),
    GGMLQuantizationType.Q8_0: (34, _q8_0),
    GGMLQuantizationType.Q4_K: (144, _q4_k),
    GGMLQuantizationType.Q5_K: (176, _q5_k),
    GGMLQuantizationType.MXFP4: (17, _mxfp4),
}
"""The types that stay quantized, with their bytes per block."""

_WITHOUT_MINIMA = (GGMLQuantizationType.Q4_0, GGMLQuantizationType.Q5_0, GGMLQuantizationType.Q8_0)
"""Types whose values Torch computes faster than NumPy, to the same bits."""


def _with_minimum(format: CodeFormat, codes: Tensor, scales: Tensor, minima: Tensor) -> QuantizedWeight:
    """Return the weight with values `scales * codes + minima`.

    In a group with scale 0, all values are the minimum: its codes become 1, and its scale the minimum.
    """
    flat = scales == 0
    if flat.any():
        codes = torch.where(flat.repeat_interleave(BLOCK, dim=1), codes.new_ones(()), codes)
        scales = torch.where(flat, minima, scales)
    zeros = torch.where(flat, 0.0, -minima / torch.where(scales == 0, 1.0, scales))
    return QuantizedWeight(format, codes, scales, zeros)


def _half(blocks: Tensor, start: int) -> Tensor:
    """Return a float16 of each block, as float32 [rows, blocks]."""
    return blocks[..., start : start + 2].contiguous().view(torch.float16).squeeze(-1).float()


def _nibbles(packed: Tensor) -> Tensor:
    """Return the bytes' low halves, then their high halves, uint8 [..., 2 * bytes]."""
    return torch.cat([packed & 15, packed >> 4], dim=-1)


def _bits(packed: Tensor) -> Tensor:
    """Return the bytes' bits, lowest first, uint8 [..., 8 * bytes]."""
    return ((packed[..., None] >> torch.arange(8, dtype=torch.uint8, device=packed.device)) & 1).flatten(-2)


def _k_codes(packed: Tensor) -> Tensor:
    """Return 256 four-bit codes; every 32 bytes have two groups of 32."""
    return _nibbles(packed.unflatten(-1, (4, 32))).flatten(-2)


def _k_scales(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return scales and minima of groups of 32, float32 [rows, 8 * blocks].

    Twelve bytes hold six bits of each: bytes 0 to 3 the first four groups' scales, bytes 4 to 7 their minima.
    The other groups have the low four bits in bytes 8 to 11, and the high two in the top bits of bytes 0 to
    7.
    """
    first, second, third = blocks[..., 4:16].unflatten(-1, (3, 4)).unbind(-2)
    scales = torch.cat([first & 63, (third & 15) | (first >> 6 << 4)], dim=-1)
    minima = torch.cat([second & 63, (third >> 4) | (second >> 6 << 4)], dim=-1)
    factors = _half(blocks, 0).unsqueeze(-1), _half(blocks, 2).unsqueeze(-1)
    return (factors[0] * scales).flatten(1), -(factors[1] * minima).flatten(1)
