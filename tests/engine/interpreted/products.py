"""Our matrix product kernel in Triton's interpreter, compared with torch's with the dequantized weights."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from engine.devices.cuda import products
from engine.devices.cuda.products import TiledLinear, fits, join, tile_linears
from engine.linear.quantized import QuantizedLinear, round_to_nearest
from engine.quantization.weight import CodeFormat, QuantizedWeight

INT8, INT4, FP8, MXFP4 = CodeFormat
CASES = {
    "int8, a scale an output": (INT8, 96, 96),
    "int8, groups": (INT8, 128, 64),
    "int4, groups of 32": (INT4, 96, 32),
    "int4, groups of 128": (INT4, 256, 128),
    "int4, a scale an output": (INT4, 192, 192),
    "fp8, a scale an output": (FP8, 160, 160),
    "fp8, blocks of 128": (FP8, 256, 128),
    "mxfp4": (MXFP4, 64, 32),
}
OUTPUTS = 40


def weight_of(format: CodeFormat, inputs: int, group: int, seed: int = 0) -> QuantizedWeight:
    torch.manual_seed(seed)
    return round_to_nearest(torch.randn(OUTPUTS, inputs), format, group)


def with_zeros_and_order(weight: QuantizedWeight) -> QuantizedWeight:
    zeros = torch.randint(0, 17, weight.scales.shape).float()
    order = torch.randperm(weight.codes.shape[1])
    return QuantizedWeight(weight.format, weight.codes, weight.scales, zeros, order)


@pytest.mark.parametrize("case", CASES)
def test_it_equals_the_product_with_the_dequantized_weight(case: str) -> None:
    weight, bias = weight_of(*CASES[case]), torch.randn(OUTPUTS)
    check(weight, bias)
    check(weight, None)


def test_zero_points_and_inputs_in_another_order() -> None:
    check(with_zeros_and_order(weight_of(INT4, 128, 32)), None)


def test_every_value_of_four_bits_and_of_float8() -> None:
    codes = torch.arange(16, dtype=torch.uint8).repeat(4, 2)
    check(QuantizedWeight(INT4, codes, torch.rand(4, 1) + 0.5), None)
    check(QuantizedWeight(MXFP4, codes, torch.tensor([[2.0**-127], [0.25], [1.0], [2.0**100]])), None)
    bits = torch.arange(256, dtype=torch.uint8)
    bits[(bits & 127) == 127] = 0  # NaN
    check(QuantizedWeight(FP8, bits.view(torch.float8_e4m3fn).view(2, 128), torch.rand(2, 1) + 0.5), None)


def check(weight: QuantizedWeight, bias: torch.Tensor | None) -> None:
    x = torch.randn(3, weight.codes.shape[1])
    expected = QuantizedLinear(weight, bias)(x)
    assert fits(weight)
    tiled = TiledLinear.quantized(weight, bias)
    assert (tiled.out_features, tiled.in_features) == weight.codes.shape
    torch.testing.assert_close(tiled(x), expected, atol=1e-6 * float(expected.abs().max()), rtol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("format", [None, INT4])
def test_a_row_has_the_same_bits_alone_and_among_many(format: CodeFormat | None, dtype: torch.dtype) -> None:
    torch.manual_seed(3)
    x = torch.randn(150, 96).to(dtype)
    if format is None:
        tiled = TiledLinear.plain(torch.randn(OUTPUTS, 96).to(dtype), None)
    else:
        tiled = TiledLinear.quantized(weight_of(format, 96, 32), None)
    together = tiled(x)
    for row in (0, 70, 149):
        assert torch.equal(tiled(x[row : row + 1])[0], together[row])
    assert torch.equal(tiled(x[3:64]), together[3:64])


@pytest.mark.parametrize("format", [INT4, MXFP4])
def test_a_few_rows_sums_are_shared_by_programs(format: CodeFormat, monkeypatch: pytest.MonkeyPatch) -> None:
    """And added in the order in which one program adds them for many rows or many outputs."""
    torch.manual_seed(6)
    weight, bias = weight_of(format, 2528, 32), torch.randn(OUTPUTS)
    tiled, x, launched = TiledLinear.quantized(weight, bias), torch.randn(70, 2528), []
    together = tiled(x)
    expected = QuantizedLinear(weight, bias)(x)
    torch.testing.assert_close(together, expected, atol=1e-5 * float(expected.abs().max()), rtol=0)
    arrivals = torch.zeros(512, dtype=torch.int32)
    monkeypatch.setattr(products, "_arrivals", lambda device: launched.append(arrivals) or arrivals)
    for rows in (1, 9):
        assert torch.equal(tiled(x[:rows]), together[:rows])
    assert len(launched) == 2 and not arrivals.any()
    monkeypatch.setattr(products, "_MANY_TILES", 1)
    assert torch.equal(tiled(x[:9]), together[:9]) and len(launched) == 2


@pytest.mark.parametrize(
    ("format", "group", "programs"), [(INT4, 128, 512), (INT4, 32, 1024), (MXFP4, 32, 1024)]
)
def test_one_row_has_programs_that_ask_for_enough_memory(
    format: CodeFormat, group: int, programs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A weight with 4,096 inputs and outputs: programs ask for 2 MB of codes at a time."""
    tiled = TiledLinear.quantized(round_to_nearest(torch.randn(4096, 4096), format, group), None)
    launched: list[tuple[int, ...]] = []
    stages: list[int] = []

    class Launched:
        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            launched.append(grid)
            return lambda *_, COLUMNS, DEPTH, num_stages, **__: stages.append(
                num_stages * COLUMNS * DEPTH // 2
            )

    monkeypatch.setattr(products, "multiply", Launched())
    tiled(torch.randn(1, 4096, dtype=torch.bfloat16))
    assert [math.prod(grid) for grid in launched] == [programs]
    assert programs * stages[0] == 2 << 20


def test_inputs_in_any_layout() -> None:
    torch.manual_seed(4)
    tiled = TiledLinear.plain(torch.randn(OUTPUTS, 40), torch.randn(OUTPUTS))
    x = torch.randn(2, 5, 80)[..., :40]
    expected = nn.functional.linear(x, tiled.weight, tiled.bias)
    torch.testing.assert_close(tiled(x), expected, atol=1e-5, rtol=0)
    torch.testing.assert_close(tiled(x.transpose(0, 1)), expected.transpose(0, 1), atol=1e-5, rtol=0)
    assert tiled(x[:0]).shape == (0, 5, OUTPUTS)


def test_joined_layers_are_parts_of_one_product() -> None:
    weights = [with_zeros_and_order(weight_of(INT4, 64, 32, seed)) for seed in range(2)]
    weights[1] = replace(weights[1], permutation=weights[0].permutation)
    linears = [TiledLinear.quantized(weight, torch.randn(OUTPUTS)) for weight in weights]
    x = torch.randn(2, 64)
    before = [linear(x) for linear in linears]
    assert linears[0].is_like(linears[1])
    joined = join(linears)
    assert torch.equal(joined(x), torch.cat(before, dim=1))
    assert all(torch.equal(linear(x), was) for linear, was in zip(linears, before, strict=True))
    assert join(linears).weight.data_ptr() == joined.weight.data_ptr() == linears[0].weight.data_ptr()
    another_order = with_zeros_and_order(weight_of(INT4, 64, 32, seed=2))
    for other in (weight_of(INT4, 64, 64), weight_of(INT8, 64, 32), weight_of(INT4, 64, 32), another_order):
        assert not TiledLinear.quantized(other, torch.zeros(OUTPUTS)).is_like(linears[0])
    assert not TiledLinear.quantized(weights[0], None).is_like(linears[0])
    assert TiledLinear.quantized(weights[0], torch.zeros(OUTPUTS)).is_like(linears[0])
    int8, fp8 = (TiledLinear.quantized(weight_of(format, 64, 64), None) for format in (INT8, FP8))
    assert not int8.is_like(fp8)


def test_a_models_layers() -> None:
    model = nn.Sequential(
        QuantizedLinear(weight_of(INT4, 64, 32)),
        QuantizedLinear(weight_of(INT8, OUTPUTS, 8)),
        nn.Linear(OUTPUTS, 8),
    )
    x = torch.randn(3, 64)
    expected = model(x)
    tile_linears(model, torch.float32, plain=False)
    assert [type(module) for module in model] == [TiledLinear, nn.Linear, nn.Linear]
    torch.testing.assert_close(model(x), expected, atol=1e-4, rtol=0)
    tile_linears(model, torch.float32, plain=True)
    assert {type(module) for module in model} == {TiledLinear}
    torch.testing.assert_close(model(x), expected, atol=1e-4, rtol=0)


def test_gpt2s_transposed_layers() -> None:
    torch.manual_seed(5)
    layer = Conv1D(OUTPUTS, 64)
    nn.init.normal_(layer.bias)
    model, x = nn.Sequential(layer), torch.randn(2, 3, 64)
    expected = model(x)
    tile_linears(model, torch.float32, plain=False)
    assert model[0] is layer
    tile_linears(model, torch.float32, plain=True)
    assert type(model[0]) is TiledLinear
    torch.testing.assert_close(model(x), expected, atol=1e-4, rtol=0)
