"""Codes of 4 or 8 bits that lie one after the other in int32 words, the first in a word's lowest bits."""

from __future__ import annotations

import torch
from torch import Tensor


def unpack(words: Tensor, bits: int) -> Tensor:
    """uint8 [rows, codes] of int32 [rows, words]."""
    octets = _compact(words).view(torch.uint8)
    if bits == 8:
        return octets
    return unpack_pairs(octets)


def pack(codes: Tensor, bits: int) -> Tensor:
    """int32 [rows, words] of uint8 [rows, codes]; a last word that is not full has zeros at its end."""
    missing = -codes.shape[1] % (32 // bits)
    codes = torch.nn.functional.pad(codes, (0, missing))
    octets = codes if bits == 8 else pack_pairs(codes)
    return _compact(octets).view(torch.int32)


def unpack_pairs(octets: Tensor) -> Tensor:
    """Each uint8's lower and upper four bits: twice as many columns."""
    return torch.stack([octets & 15, octets >> 4], dim=-1).flatten(-2)


def pack_pairs(codes: Tensor) -> Tensor:
    """Inverse of `unpack_pairs`."""
    return codes[:, 0::2] | (codes[:, 1::2] << 4)


INT8_ZERO = 128
"""The zero point of 8-bit codes that are stored without a sign."""


def move_zero(codes: Tensor) -> Tensor:
    """int8 of uint8 that have 128 for zero, and the other way round."""
    flipped = _compact(codes).view(torch.uint8) ^ INT8_ZERO
    return flipped if codes.dtype is torch.int8 else flipped.view(torch.int8)


E8M0_NAN = 255


def powers(exponents: Tensor) -> Tensor:
    """float32 powers of two of E8M0 (OCP Microscaling Formats, 2023): exponents of a bias of 127."""
    return torch.exp2(exponents.to(torch.float32) - 127)


def _compact(tensor: Tensor) -> Tensor:
    """With the strides of its shape, which `contiguous` leaves as they are where a size is 1."""
    return tensor.clone(memory_format=torch.contiguous_format)
