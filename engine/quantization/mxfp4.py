"""gpt-oss's own MXFP4 checkpoints: a tensor has the weights of all experts, and is dequantized at load.

E2M1 codes, and one power of two (E8M0) for 32 inputs: OCP Microscaling Formats, 2023.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from engine.errors import UnsupportedModelError
from engine.quantization.weight import CodeFormat, QuantizedWeight
from engine.quantization.words import unpack_pairs

METHOD = "mxfp4"
"""The `quant_method` of their `quantization_config`."""

BLOCKS, SCALES = "_blocks", "_scales"
_GROUP_BYTES = 16
"""Of 32 codes, the lower four bits of a byte first."""
_BIAS, _NAN = 127, 255
"""Of E8M0."""


def dequantized(tensors: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """The checkpoint with NAME, `dtype` [experts, inputs, outputs], in place of NAME_blocks, uint8 [experts,
    outputs, groups, 16], and NAME_scales, uint8 [experts, outputs, groups].

    Raises UnsupportedModelError, naming a tensor.
    """
    plain = {name: tensor for name, tensor in tensors.items() if not name.endswith((BLOCKS, SCALES))}
    for name, blocks in tensors.items():
        if name.endswith(BLOCKS):
            weight = name.removesuffix(BLOCKS)
            if weight + SCALES not in tensors:
                raise UnsupportedModelError(f"{weight}{SCALES}: is missing beside {name}")
            plain[weight] = _weight(weight, blocks, tensors[weight + SCALES], dtype)
    return plain


def _weight(name: str, blocks: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
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
    if (scales == _NAN).any():
        raise UnsupportedModelError(f"{name}{SCALES}: has scales that are NaN")
    experts, outputs, groups, _ = blocks.shape
    weight = torch.empty(experts, 2 * _GROUP_BYTES * groups, outputs, dtype=dtype)
    for expert in range(experts):  # one at a time: in float32 all of them need several times the memory
        codes = unpack_pairs(blocks[expert].flatten(1))
        powers = torch.exp2(scales[expert].to(torch.float32) - _BIAS)
        weight[expert] = QuantizedWeight(CodeFormat.MXFP4, codes, powers).dequantized().T
    return weight
