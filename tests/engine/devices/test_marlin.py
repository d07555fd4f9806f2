"""4-bit weights in Marlin's layout, read back by what vLLM publishes of it.

vLLM's operators run on GPUs alone. Those here have its schemas and compute on the CPU: repacking as
`marlin_utils_test.py` describes it, and a product that undoes it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton is for Linux")

from engine.devices.cuda import library_products, marlin
from engine.devices.cuda.joined_products import joined
from engine.devices.cuda.library_products import LibraryLinear
from engine.devices.cuda.marlin import MarlinProduct
from engine.devices.cuda.products import TiledLinear, describe, tiled
from engine.linear.quantized import QuantizedLinear, round_to_nearest
from engine.quantization.weight import CodeFormat, QuantizedWeight

BF16 = torch.bfloat16
UINT4, UINT4B8 = 1, 2
GEMM = (
    "marlin_gemm(Tensor a, Tensor? c_or_none, Tensor b_q_weight, Tensor? b_bias_or_none, Tensor b_scales, "
    "Tensor? a_scales, Tensor? global_scale, Tensor? b_zeros_or_none, {order}Tensor workspace, "
    "int b_type_id, SymInt size_m, SymInt size_n, SymInt size_k, {full}bool use_atomic_add, "
    "bool use_fp32_reduce, bool is_zp_float) -> Tensor"
)
REPACK = (
    "gptq_marlin_repack(Tensor b_q_weight, {order}SymInt size_k, SymInt size_n, int num_bits, "
    "bool is_a_8bit) -> Tensor"
)
VERSIONS = {
    "with act_order": (
        GEMM.format(order="Tensor? g_idx_or_none, Tensor? perm_or_none, ", full="bool is_k_full, "),
        REPACK.format(order="Tensor perm, "),
    ),
    "without": (GEMM.format(order="", full=""), REPACK.format(order="")),
}


def order_of_weights() -> list[int]:
    """The places of 1,024 codes, a tile of 16 inputs by 64 outputs, each in 16 rows of 16."""
    order: list[int] = []
    for thread in range(32):
        column, pair = thread // 4, 2 * (thread % 4)
        rows = pair, pair + 1, pair + 8, pair + 9
        own = [16 * row + column + 8 * block for block in range(2) for row in rows]
        order += [256 * tile + place for tile in range(4) for place in own]
    return [order[first + each] for first in range(0, 1024, 8) for each in (0, 2, 4, 6, 1, 3, 5, 7)]


SCALES = [row + 8 * column for row in range(8) for column in range(8)]
SINGLE_SCALES = [2 * row + each for row in range(4) for each in (0, 1, 8, 9, 16, 17, 24, 25)]


def unpacked(words: Tensor) -> Tensor:
    """Return the eight codes of each word [..., 8]."""
    return torch.stack([words >> 4 * place & 15 for place in range(8)], -1)


def inverse(order: list[int]) -> Tensor:
    return torch.tensor(order).argsort()


def reordered(rows: Tensor, order: Tensor) -> Tensor:
    return rows.reshape(-1, len(order))[:, order].reshape(rows.shape)


def repack(b_q_weight: Tensor, size_k: int, size_n: int, num_bits: int) -> Tensor:
    assert b_q_weight.dtype is torch.int32 and b_q_weight.is_contiguous() and num_bits == 4
    assert b_q_weight.shape == (size_k // 8, size_n) and not (size_k % 16 or size_n % 64)
    codes = unpacked(b_q_weight).transpose(1, 2).reshape(size_k, size_n)
    tiles = codes.view(size_k // 16, 16, size_n // 16, 16).transpose(1, 2).reshape(size_k // 16, -1)
    placed = reordered(tiles, torch.tensor(order_of_weights())).unflatten(1, (-1, 8))
    return sum(placed[..., place] << 4 * place for place in range(8)).int()


def gemm(given: dict[str, Any]) -> Tensor:
    a, words, scales, zeros = (given[name] for name in ("a", "b_q_weight", "b_scales", "b_zeros_or_none"))
    inputs, outputs = given["size_k"], given["size_n"]
    assert a.shape == (given["size_m"], inputs) and a.stride(1) == 1 and a.stride(0) % 8 == 0
    assert words.shape == (inputs // 16, 2 * outputs) and words.is_contiguous() and scales.is_contiguous()
    assert a.dtype is scales.dtype and scales.shape[1] == outputs and len(given["workspace"]) >= 1
    assert not given["use_atomic_add"] and not given["is_zp_float"] and given["use_fp32_reduce"]
    codes = reordered(unpacked(words).flatten(1), inverse(order_of_weights()))
    codes = codes.view(inputs // 16, outputs // 16, 16, 16).transpose(1, 2).reshape(inputs, outputs)
    groups = len(scales)
    scales = reordered(scales, inverse(SINGLE_SCALES if groups == 1 else SCALES)).float()
    if zeros is None:
        assert given["b_type_id"] == UINT4B8
        offsets = torch.full((groups, outputs), 8)
    else:
        assert given["b_type_id"] == UINT4 and zeros.shape == (groups, outputs // 8)
        offsets = unpacked(zeros)[..., inverse([0, 2, 4, 6, 1, 3, 5, 7])].flatten(1)
        offsets = reordered(offsets, inverse(SCALES))
    each = inputs // groups
    weight = (codes - offsets.repeat_interleave(each, 0)) * scales.repeat_interleave(each, 0)
    out = a.float() @ weight
    if (bias := given["b_bias_or_none"]) is not None:
        assert bias.dtype is a.dtype
        out = out + reordered(bias, inverse(SINGLE_SCALES)).float()
    return out.to(a.dtype)


@pytest.fixture(params=VERSIONS)
def vllm(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Install vLLM's operators, of two versions."""
    of_gemm, of_repack = VERSIONS[request.param]
    for name in ("vllm", "vllm._custom_ops", "vllm.scalar_type"):
        module = ModuleType(name)
        module.__spec__ = ModuleSpec(name, None)
        monkeypatch.setitem(sys.modules, name, module)
    types = SimpleNamespace(uint4=SimpleNamespace(id=UINT4), uint4b8=SimpleNamespace(id=UINT4B8))
    sys.modules["vllm.scalar_type"].scalar_types = types  # type: ignore[attr-defined]
    monkeypatch.setattr(library_products, "capability_of", lambda device: (8, 0))
    library_products._passes.cache_clear()
    with torch.library._scoped_library("_C", "FRAGMENT") as library:
        for schema in (of_gemm, of_repack):
            library.define(schema)
        names = [each.name for each in torch.ops._C.marlin_gemm.default._schema.arguments]
        library.impl("marlin_gemm", lambda *args: gemm(dict(zip(names, args, strict=True))), "CPU")
        library.impl("gptq_marlin_repack", lambda words, *args: repack(words, *args[-4:-1]), "CPU")
        yield
        for found in (marlin._operator, marlin._names, marlin._type_id, library_products._passes):
            found.cache_clear()
    for name in ("marlin_gemm", "gptq_marlin_repack"):
        vars(torch.ops._C).pop(name, None)


def weight_of(outputs: int, inputs: int, group: int, *, zeros: bool = False) -> QuantizedWeight:
    torch.manual_seed(outputs)
    weight = round_to_nearest(torch.randn(outputs, inputs), CodeFormat.INT4, group)
    return replace(weight, zeros=torch.randint(16, weight.scales.shape).float()) if zeros else weight


def layer(weight: QuantizedWeight, bias: Tensor | None = None) -> Any:
    return tiled(QuantizedLinear(weight, bias), BF16, plain=False)


@pytest.mark.parametrize("zeros", [False, True], ids=["symmetric", "zero points"])
@pytest.mark.parametrize("group", [32, 64, 128, 256])
def test_it_multiplies_by_the_weight(group: int, zeros: bool, vllm: None) -> None:
    weight, x = weight_of(192, 256, group, zeros=zeros), torch.randn(2, 3, 256).to(BF16)
    bias = torch.randn(192).to(BF16)
    for own in (None, bias):
        found = layer(weight, own)
        assert isinstance(found, LibraryLinear) and isinstance(found.product, MarlinProduct)
        scales = weight.scales.to(BF16).float()
        expected = x.float() @ replace(weight, scales=scales).dequantized().T
        expected = (expected if own is None else expected + own.float()).to(BF16)
        torch.testing.assert_close(found(x), expected, rtol=1.6e-2, atol=1e-2)


def test_layers_of_one_input_are_one_product(vllm: None) -> None:
    layers = [layer(weight_of(size, 256, 64)) for size in (128, 64, 192)]
    x = torch.randn(5, 256).to(BF16)
    expected = [each(x) for each in layers]
    whole = joined(tuple(layers))
    assert isinstance(whole, LibraryLinear)
    torch.testing.assert_close(whole(x), torch.cat(expected, 1))
    assert describe(layers, BF16) == "3 layers by vLLM's Marlin; others cuBLAS, bfloat16"


def test_our_kernel_multiplies_by_other_weights(vllm: None, monkeypatch: pytest.MonkeyPatch) -> None:
    fitting = weight_of(64, 256, 32)
    order = torch.randperm(256)
    sixteen = torch.full_like(fitting.scales, 16)
    for weight in (
        weight_of(32, 256, 32),
        weight_of(64, 192, 32),
        replace(fitting, permutation=order),
        replace(fitting, zeros=sixteen),
    ):
        assert type(layer(weight)) is TiledLinear
    assert type(tiled(QuantizedLinear(fitting), BF16, plain=True)) is TiledLinear  # as with --deterministic
    assert type(tiled(QuantizedLinear(fitting), torch.float32, plain=False)) is TiledLinear
    monkeypatch.delitem(sys.modules, "vllm")
    assert type(layer(fitting)) is TiledLinear


def test_an_operator_with_unknown_arguments_is_not_used(vllm: None) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(marlin, "_names", lambda name: ("a", "something_new"))
        assert type(layer(weight_of(64, 256, 32))) is TiledLinear
