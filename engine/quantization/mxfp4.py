"""gpt-oss's own MXFP4 checkpoints, in which one tensor has the weights of all experts.

E2M1 codes, with one power of two (E8M0) for each 32 inputs: OCP Microscaling Formats, 2023.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from engine.quantization.weight import CodeFormat, QuantizedWeight
from engine.quantization.words import E8M0_NAN, powers, unpack_pairs
from protocol.errors import UnsupportedModelError

METHOD = "mxfp4"
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


def split(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, StackedWeights]]:
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
