"""Codes of 4 or 8 bits packed in int32 words, the first code in a word's lowest bits."""

from __future__ import annotations

import torch
from torch import Tensor


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
