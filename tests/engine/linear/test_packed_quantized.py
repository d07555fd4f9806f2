"""Packed quantized layers: right to bfloat16's last bit, and the same bits in every batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from engine.linear.experts import RoutedQuantizedLinear
from engine.linear.packed import PackedLinear
from engine.linear.packed_quantized import (
    PackedQuantizedLinear,
    PackedWeight,
    fits,
    join,
    pack_quantized_linears,
)
from engine.linear.quantized import QuantizedLinear
from engine.quantization.weight import CodeFormat, QuantizedWeight
from tests.engine.kernels import needs_kernel
from tests.engine.linear.conftest import KERNELS
from tests.engine.quantized_weights import make_weight

pytestmark = needs_kernel

WEIGHTS: dict[str, Callable[[int, int], QuantizedWeight]] = {
    "int8 by channel": lambda k, n: make_weight(CodeFormat.INT8, k, n),
    "int8 in groups of 64": lambda k, n: make_weight(CodeFormat.INT8, k, n, 64),
    "int4 in groups of 32": lambda k, n: make_weight(CodeFormat.INT4, k, n, 32),
    "int4 in groups of 64, zeros": lambda k, n: make_weight(CodeFormat.INT4, k, n, 64, zeros=True),
    "int4 in groups of 128": lambda k, n: make_weight(CodeFormat.INT4, k, n, 128 if k % 128 == 0 else 32),
    "int4 by channel, zeros, permuted": lambda k, n: make_weight(CodeFormat.INT4, k, n, None, True, True),
    "int4 in groups of 32, zeros, permuted": lambda k, n: make_weight(CodeFormat.INT4, k, n, 32, True, True),
    "fp8 by channel": lambda k, n: make_weight(CodeFormat.FP8, k, n),
    "fp8 in groups of 128": lambda k, n: make_weight(CodeFormat.FP8, k, n, 128 if k % 128 == 0 else None),
    "mxfp4": lambda k, n: make_weight(CodeFormat.MXFP4, k, n, 32),
}
ROUNDING = [kind for kind in WEIGHTS if kind.startswith("int")]
ALL = [*WEIGHTS, *(f"{kind}, rounding" for kind in ROUNDING)]
"""Kinds that can round their inputs occur with and without rounding."""
BATCHED = [
    (kernel, kind)
    for at, kernel in enumerate(KERNELS)
    for kind in (ALL[at % 3 :: 3] if "emulated" in kernel else ALL)
]
"""Emulated instructions are slow, so each of these kernels has a third of the weights."""


def layer(kind: str, inputs: int, outputs: int, bias: bool) -> tuple[QuantizedLinear, PackedQuantizedLinear]:
    weight = WEIGHTS[kind.removesuffix(", rounding")](inputs, outputs)
    weight = replace(weight, input_group=128 * kind.endswith(", rounding"))
    linear = QuantizedLinear(weight, torch.randn(outputs).bfloat16() if bias else None)
    return linear, PackedQuantizedLinear(PackedWeight.of(weight), linear.bias)


SHAPES = [(64, 65), (192, 16), (384, 130)]
PRODUCTS = [
    (kernel, kind, *SHAPES[(i + j) % len(SHAPES)])
    for i, kernel in enumerate(KERNELS)
    for j, kind in enumerate(WEIGHTS)
]
"""Each kernel with each kind, and both with each shape."""


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize(("kernel", "kind", "inputs", "outputs"), PRODUCTS, indirect=["kernel"])
def test_a_product_equals_the_dequantized_weights(kind: str, inputs: int, outputs: int) -> None:
    linear, ours = layer(kind, inputs, outputs, bias=outputs != 16)
    weight = linear.quantized.dequantized().double()
    largest = weight.abs().amax()
    for rows in (1, 7, 16, 33, 200):
        x = torch.randn(rows, inputs).bfloat16()
        exact = x.double() @ weight.T
        if linear.bias is not None:
            exact += linear.bias.double()
        error = (ours(x).double() - exact).abs()
        scale = x.double().abs().sum(1, keepdim=True) * largest
        assert (error <= exact.abs() * 2**-8 + scale * 2**-20).all(), rows


def rounded(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the last dimension in units of its largest magnitude / 127, and the units."""
    largest = x.float().abs().amax(-1, keepdim=True)
    return (x.float() * (torch.tensor(127.0) / largest)).round(), largest / 127


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize(("inputs", "outputs"), [(64, 65), (192, 16), (2048, 130)])
def test_rounded_rows_have_the_bits_of_the_definition(inputs: int, outputs: int) -> None:
    scales = torch.randint(0, 2, (outputs, 1)).add(1).float()
    weight = replace(make_weight(CodeFormat.INT8, inputs, outputs), scales=scales, input_group=inputs)
    ours = PackedQuantizedLinear(PackedWeight.of(weight), None)
    for rows in (1, 5, 7, 33, 200):
        x = (torch.randn(rows, inputs) * torch.rand(rows, 1).exp2()).bfloat16()
        integers, units = rounded(x)
        sums = integers.double() @ weight.codes.double().T
        assert torch.equal(ours(x), (sums.float() * units * scales.T).bfloat16()), rows


GROUPS = [32, 128, 4096]
RUNS = [
    (kernel, kind, GROUPS[(i + j) % len(GROUPS)])
    for i, kernel in enumerate(KERNELS)
    for j, kind in enumerate(ROUNDING)
]


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize(("kernel", "kind", "input_group"), RUNS, indirect=["kernel"])
def test_rounded_runs_have_the_integers_of_the_definition(kind: str, input_group: int) -> None:
    """All scales and units are powers of two, so float32 is exact."""
    inputs, outputs = 384, 70
    weight = WEIGHTS[kind](inputs, outputs)
    scales = torch.randint(0, 2, weight.scales.shape).add(1).float()
    zeros = None if weight.zeros is None else weight.zeros.clamp(max=10)
    weight = replace(weight, scales=scales, zeros=zeros, input_group=input_group)
    ours = PackedQuantizedLinear(PackedWeight.of(weight), None)
    order = torch.arange(inputs) if weight.permutation is None else weight.permutation
    for rows in (1, 6, 13):
        ordered = torch.randint(-126, 127, (rows, inputs // 32, 32)).float()
        ordered[:, :, 0] = 127
        ordered = (ordered * torch.randint(0, 3, (rows, inputs // 32, 1)).exp2()).flatten(1)
        x = torch.empty(rows, inputs, dtype=torch.bfloat16)
        x[:, order] = ordered.bfloat16()
        integers, units = rounded(ordered.unflatten(1, (-1, min(input_group, weight.group_size))))
        values = (integers * units).flatten(1)[:, order.argsort()]
        exact = values.double() @ weight.dequantized().double().T
        assert torch.equal(ours(x), exact.bfloat16()), rows


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("outputs", [1, 70])
def test_rows_that_cannot_be_rounded(outputs: int) -> None:
    weight = replace(make_weight(CodeFormat.INT8, 64, outputs), input_group=64)
    bias = torch.randn(outputs).bfloat16()
    x = torch.randn(6, 64).bfloat16()
    x[1], x[2], x[3, 5], x[4, 63] = 0, 2.0**-125, torch.nan, torch.inf
    y = PackedQuantizedLinear(PackedWeight.of(weight), bias)(x)
    assert torch.equal(y[1], bias) and torch.equal(y[2], bias)
    assert y[3].isnan().all() and y[4].isnan().all()
    assert y[0].isfinite().all() and y[5].isfinite().all()


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("kind", ["int8 by channel", "int4 in groups of 32", "int4 in groups of 64, zeros"])
def test_a_row_with_nan_or_infinity_is_not_finite(kind: str) -> None:
    _, ours = layer(kind, 64, 80, bias=True)
    x = torch.randn(3, 64).bfloat16()
    sound = ours(x)
    x[1, 5], x[2, 6] = torch.nan, torch.inf
    y = ours(x)
    assert torch.equal(y[0], sound[0])
    assert y[1].isnan().all() and not y[2].isfinite().any()
    alone = torch.cat([ours(row) for row in x.split(1)])
    torch.testing.assert_close(alone, y, rtol=0, atol=0, equal_nan=True)


@pytest.mark.usefixtures("kernel")
def test_the_largest_sum_fits() -> None:
    inputs = 1 << 16
    codes = torch.full((1, inputs), -128, dtype=torch.int8)
    weight = QuantizedWeight(CodeFormat.INT8, codes, torch.ones(1, 1), input_group=inputs)
    y = PackedQuantizedLinear(PackedWeight.of(weight), None)(torch.full((1, inputs), 127.0).bfloat16())
    assert y.item() == torch.tensor(-128.0 * 127 * inputs).bfloat16()


@pytest.mark.usefixtures("kernel", "threads_restored")
@pytest.mark.parametrize(("kernel", "kind"), BATCHED, indirect=["kernel"])
def test_a_rows_bits_depend_neither_on_its_batch_nor_on_the_threads(kind: str) -> None:
    _, ours = layer(kind, 256, 150, bias=True)
    x = torch.randn(240, 256).bfloat16()
    torch.set_num_threads(1)
    alone = torch.cat([ours(row) for row in x[:40].split(1)])
    torch.set_num_threads(2)
    for rows in range(2, 41):  # for each number of rows, a row is tried at every place
        assert torch.equal(ours(x[40 - rows : 40]), alone[40 - rows :]), rows
    assert torch.equal(ours(x)[:40], alone)


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("kind", [kind for kind in ALL if kind.startswith("int8")])
def test_rows_of_a_table_are_the_dequantized_ones(kind: str) -> None:
    linear, packed = layer(kind, 192, 130, bias=False)
    assert packed.packed.is_table()
    rows = packed.packed.bfloat16_rows(5, 130)
    assert torch.equal(rows, linear.quantized.dequantized()[5:].bfloat16())


HALVES = ["int8 in groups of 64", "int4 in groups of 32", "int4 in groups of 32, zeros, permuted"]


def with_halves(weight: QuantizedWeight) -> QuantizedWeight:
    """Return the weight with float16 numbers as scales, and as values of code 0 if it has zero points."""
    scales = weight.scales.half().float()
    scales[::3] = 3 * 2.0**-24  # a subnormal number
    zeros = None if weight.zeros is None else (scales * weight.zeros).half().float() / scales
    return replace(weight, scales=scales, zeros=zeros)


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("kind", [*HALVES, *(f"{kind}, rounding" for kind in HALVES)])
def test_scales_stored_as_float16_give_the_same_bits(kind: str) -> None:
    linear, _ = layer(kind, 192, 130, bias=False)
    stored = PackedWeight.of(with_halves(linear.quantized))
    minima = stored.minima
    assert stored.scales.dtype is torch.float16 and (minima is None or minima.dtype is torch.float16)
    wide = replace(stored, scales=stored.scales.float(), minima=None if minima is None else minima.float())
    for rows in (1, 7, 40):
        x = torch.randn(rows, 192).bfloat16()
        products = [PackedQuantizedLinear(each, None)(x) for each in (stored, wide)]
        assert torch.equal(*products), rows


@pytest.mark.parametrize("scale", [2.0**-25, 2.0**16])
def test_scales_beyond_float16_stay_float32(scale: float) -> None:
    weight = replace(make_weight(CodeFormat.INT8, 64, 70, 32), scales=torch.ones(70, 2))
    extreme = torch.ones(70, 2)
    extreme[3, 1] = scale
    stored = PackedWeight.of(replace(weight, scales=extreme))
    assert stored.scales.dtype is torch.float32 and PackedWeight.of(weight).scales.dtype is torch.float16
    x = torch.zeros(2, 64).bfloat16()
    x[:, 40] = 1
    exact = PackedQuantizedLinear(PackedWeight.of(weight), None)(x)
    exact[:, 3] *= scale
    assert torch.equal(PackedQuantizedLinear(stored, None)(x), exact)


@pytest.mark.parametrize("outputs", [64, 70])
def test_weights_with_scales_of_both_types_are_joined(outputs: int) -> None:
    kind = "int4 in groups of 32, zeros, permuted"
    linear, wide = layer(kind, 128, outputs, bias=False)
    half = PackedQuantizedLinear(PackedWeight.of(with_halves(linear.quantized)), None)
    both = PackedQuantizedLinear(join([half.packed, wide.packed]), None)
    x = torch.randn(3, 128).bfloat16()
    assert both.scales.dtype is torch.float32
    assert torch.equal(both(x), torch.cat([half(x), wide(x)], dim=1))
    experts, routed = torch.arange(2).repeat(3), RoutedQuantizedLinear([half, wide])
    assert torch.equal(routed(x, experts), torch.stack([half(x), wide(x)], dim=1).flatten(0, 1))


@pytest.mark.parametrize("format", list(CodeFormat))
def test_every_code_becomes_its_value(format: CodeFormat) -> None:
    """Each row of the weight has one code; all others are zero."""
    codes = torch.arange(256 if format in (CodeFormat.INT8, CodeFormat.FP8) else 16, dtype=torch.uint8)
    zero = 8 if format is CodeFormat.INT4 else 0
    weights = torch.full((len(codes), 32), zero, dtype=torch.uint8)
    weights[codes.long(), codes.long() % 32] = codes
    if format is CodeFormat.FP8:
        weights[[127, 255]] = 0  # not a number
    dtypes = {CodeFormat.INT8: torch.int8, CodeFormat.FP8: torch.float8_e4m3fn}
    weight = QuantizedWeight(format, weights.view(dtypes.get(format, torch.uint8)), torch.ones(len(codes), 1))
    values = PackedQuantizedLinear(PackedWeight.of(weight), None)(torch.eye(32).bfloat16())
    assert torch.equal(values.T.float(), weight.dequantized())


@pytest.mark.parametrize("kind", ["int4 in groups of 32, zeros, permuted, rounding", "mxfp4"])
def test_some_outputs_of_a_layer(kind: str) -> None:
    _, whole = layer(kind, 128, 200, bias=True)
    x = torch.randn(3, 128).bfloat16()
    for rows in ([range(64, 192)], [range(30, 101)], [range(64), range(100, 140)]):
        assert torch.equal(whole.rows(rows)(x), whole(x)[:, [row for each in rows for row in each]])


def test_a_layer_that_the_kernel_does_not_fit_becomes_a_plain_one() -> None:
    model = nn.Sequential(
        QuantizedLinear(make_weight(CodeFormat.INT4, 64, 40, 32), torch.randn(40).bfloat16()),
        QuantizedLinear(make_weight(CodeFormat.INT8, 40, 96)),  # 40 inputs are no multiple of 32
        QuantizedLinear(make_weight(CodeFormat.INT8, 96, 8, 16)),
    )
    assert [fits(layer.quantized) for layer in model] == [True, False, False]
    x = torch.randn(5, 64).bfloat16()
    expected = model(x)
    pack_quantized_linears(model)
    assert [type(layer) for layer in model] == [PackedQuantizedLinear, nn.Linear, nn.Linear]
    torch.testing.assert_close(model(x), expected, rtol=0.05, atol=0.05)
    assert isinstance(PackedLinear(model[1]), PackedLinear)
