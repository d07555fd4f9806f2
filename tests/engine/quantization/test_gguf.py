"""Blocks of GGUF files, and products with them, compared with the package `gguf`."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize, quantize

from checkpoints.gguf.reader import GgufTensor
from engine.linear.packed_quantized import PackedQuantizedLinear, PackedWeight, fits
from engine.quantization.gguf_blocks import dequantized, quantized_weight
from tests.engine.kernels import needs_kernel

STORED = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "MXFP4")
OTHERS = ("F32", "F16", "BF16", "Q2_K", "Q3_K", "Q6_K")
HALVES = {"Q4_1": 2, "Q5_1": 2, "Q4_K": 2, "Q5_K": 2}
"""The number of float16 values at the start of a block, if not one."""


def tensor_of(name: str, rows: int = 4, blocks: int = 3) -> GgufTensor:
    """Return a matrix of random blocks, the first of which has a scale of 0."""
    kind = GGMLQuantizationType[name]
    values, size = GGML_QUANT_SIZES[kind]
    rng = np.random.default_rng(7)
    if name in OTHERS[:3]:
        data = quantize(rng.standard_normal((rows, 32 * blocks), np.float32), kind)
        return GgufTensor("t", kind, (rows, 32 * blocks), data.view(np.uint8))
    data = rng.integers(0, 256, (rows, blocks, size), np.uint8)
    if name == "MXFP4":
        data[..., 0] = rng.integers(100, 130, (rows, blocks))
    elif name in STORED:
        halves = rng.uniform(-0.1, 0.1, (rows, blocks, HALVES.get(name, 1))).astype(np.float16)
        halves[0, 0, 0] = 0
        data[..., : 2 * halves.shape[2]] = halves.view(np.uint8)
    else:
        data[..., -4:] = np.full(2, 0.05, np.float16).view(np.uint8)
    return GgufTensor("t", kind, (rows, blocks * values), data.reshape(rows, -1))


@pytest.mark.parametrize("name", STORED)
def test_stored_values_equal_the_packages(name: str) -> None:
    tensor = tensor_of(name)
    weight = quantized_weight(tensor)
    assert weight is not None and weight.group_size == 32
    expected = torch.from_numpy(dequantize(tensor.data, tensor.type))
    largest = expected.abs().max().item()
    torch.testing.assert_close(weight.dequantized(), expected, atol=2**-22 * largest, rtol=0)


@pytest.mark.parametrize("name", [*STORED, *OTHERS])
def test_every_type_is_dequantized(name: str) -> None:
    tensor = tensor_of(name, rows=300)
    assert (quantized_weight(tensor) is not None) == (name in STORED)
    expected = torch.from_numpy(dequantize(tensor.data, tensor.type)).view(tensor.shape)
    assert torch.equal(dequantized(tensor, torch.float32), expected)


@needs_kernel
@pytest.mark.parametrize("name", STORED)
@pytest.mark.parametrize("rows", [1, 40])
def test_products(name: str, rows: int) -> None:
    weight = quantized_weight(tensor_of(name, rows=64, blocks=4))
    assert weight is not None and fits(weight)
    x = torch.randn(rows, weight.codes.shape[1], generator=torch.Generator().manual_seed(1)).bfloat16()
    out = PackedQuantizedLinear(PackedWeight.of(weight), None)(x)
    expected = x.float() @ weight.dequantized().T
    torch.testing.assert_close(out.float(), expected, atol=0.02 * expected.abs().max().item(), rtol=0)
