"""Products by libraries, and the rule that chooses these, without a GPU.

`torch._scaled_mm` with a scale a row runs on CPUs. With a scale for 128 values a reference takes its place,
with torch's checks.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import Qwen3Config

from engine.batch.runner import Step
from engine.devices.cuda import library_products
from engine.devices.cuda.attention.backend import TritonBackend
from engine.devices.cuda.buckets import Buckets
from engine.devices.cuda.decoder import CudaDecoder
from engine.devices.cuda.fp8_products import Fp8Product, rounded
from engine.devices.cuda.joined_products import SeveralWeights, joined
from engine.devices.cuda.library_products import LibraryLinear
from engine.devices.cuda.products import TiledLinear, describe, tile_linears
from engine.devices.cuda.runner import CudaRunner
from engine.devices.torch.runner import Modules, TorchRunner
from engine.kv.layout import TARGET, Group, PoolLayout, Segment
from engine.kv.pool import KVPool
from engine.kv.row_codes import KvRows
from engine.linear.quantized import QuantizedLinear, round_to_nearest
from engine.load.rounding import round_linears
from engine.model.describe import describe as describe_model
from engine.quantization.weight import CodeFormat
from tests.engine.interpreted.decoder import CPU, SHAPE, STEPS, made

BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def hopper(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let CPU tensors lie on a device of capability 9.0."""
    monkeypatch.setattr(library_products, "capability_of", lambda device: (9, 0))
    yield
    library_products._passes.cache_clear()


def quantized(outputs: int, inputs: int, group: int, *, bias: bool = False) -> QuantizedLinear:
    torch.manual_seed(outputs)
    weight = round_to_nearest(torch.randn(outputs, inputs), CodeFormat.FP8, group)
    return QuantizedLinear(weight, torch.randn(outputs, dtype=BF16) if bias else None)


def tiled(layer: nn.Module, dtype: torch.dtype = BF16, *, plain: bool = False) -> Any:
    model = nn.Sequential(layer)
    tile_linears(model, dtype, plain=plain)
    return model[0]


def near(found: Tensor, expected: Tensor, most: float) -> None:
    assert found.shape == expected.shape
    assert float((found.double() - expected.double()).norm() / expected.double().norm()) < most


def scaled_mm_by_block(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, *, bias: Tensor | None, out_dtype: torch.dtype
) -> Tensor:
    """Multiply as `torch._scaled_mm` does with a scale for 128 values of a row of `a` and of a column of `b`,
    whose layouts ATen/native/cuda/ScaledBlas.cpp checks.
    """
    (rows, inputs), outputs = a.shape, b.shape[1]
    assert a.stride() == (inputs, 1) and b.stride() == (1, inputs) and rows % 4 == 0
    groups = inputs // 128
    assert (scale_a.shape, scale_a.stride()) == ((rows, groups), (1, rows))
    assert (scale_b.t().shape, scale_b.t().stride()) == ((outputs, groups), (1, outputs))
    left = a.float() * scale_a.repeat_interleave(128, 1)
    out = left @ (b.float() * scale_b.repeat_interleave(128, 0))
    return (out if bias is None else out + bias).to(out_dtype)


@pytest.mark.parametrize("group", [256, 128])
def test_fp8_products_round_each_row_alone(group: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if group == 128:
        monkeypatch.setattr(torch, "_scaled_mm", scaled_mm_by_block)
    layer = quantized(48, 256, group, bias=True)
    product, x = Fp8Product.of(layer.quantized, layer.bias, BF16), torch.randn(7, 256).to(BF16)
    codes, scales = rounded(x, 256 // group)
    values = (codes[:7].float().unflatten(1, (-1, group)) * scales.t()[:7, :, None]).flatten(1)
    assert layer.bias is not None
    expected = values @ layer.quantized.dequantized().T + layer.bias.float()
    made = product(x)
    near(made, expected, 4e-3)
    near(made, layer(x), 0.05)
    for row in range(7):
        alone, own = rounded(x[row : row + 1], 256 // group)
        assert torch.equal(alone[0].view(torch.uint8), codes[row].view(torch.uint8))
        assert torch.equal(own[:, 0], scales[:, row])


def test_rows_are_rounded_as_keys_and_values_are() -> None:
    x = torch.randn(5, 96).to(BF16)
    x[1], x[2], x[3, 7] = 0, 1e30, torch.nan
    codes, scales = rounded(x, 1)
    expected = KvRows(BF16, "fp8_row_scales").encode(x[:, None])
    assert torch.equal(codes.view(torch.uint8)[:5], expected.values[:, 0])
    assert expected.scales is not None
    torch.testing.assert_close(scales[0, :5], expected.scales[:, 0], rtol=0, atol=0, equal_nan=True)


def test_scales_have_the_shapes_that_torch_takes() -> None:
    """By torch's own checks, for meta tensors."""
    for groups in (1, 2):
        codes = torch.empty(8, 256, dtype=torch.float8_e4m3fn, device="meta")
        weight = torch.empty(48, 256, dtype=torch.float8_e4m3fn, device="meta")
        own, others = (torch.empty(groups, size, device="meta") for size in (8, 48))
        out = torch._scaled_mm(codes, weight.t(), own.t(), others, out_dtype=BF16)
        assert out.shape == (8, 48)


def test_the_rule_chooses_by_device_format_and_determinism(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = quantized(48, 256, 256)
    assert isinstance(tiled(layer), LibraryLinear)
    assert type(tiled(layer, plain=True)) is TiledLinear  # as with --deterministic
    assert type(tiled(layer, torch.float16)) is TiledLinear
    assert type(tiled(quantized(40, 256, 256))) is TiledLinear
    for capability in ((8, 0), None):
        monkeypatch.setattr(library_products, "capability_of", lambda device, found=capability: found)
        assert type(tiled(layer)) is TiledLinear


def test_a_library_that_fails_its_trial_is_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One that raises, and one that computes something else; each is tried once."""
    tries = []

    def wrong(*args: Any, **_: Any) -> Tensor:
        tries.append(args)
        return torch.ones(8, 128)

    with caplog.at_level(logging.WARNING, "tandem.engine"):
        assert type(tiled(quantized(48, 256, 128))) is TiledLinear
        monkeypatch.setattr(torch, "_scaled_mm", wrong)
        assert all(type(tiled(quantized(48, 256, 256))) is TiledLinear for _ in "ab")
    assert len(tries) == 1
    assert "torch._scaled_mm is not used: ValueError: Invalid scaling configuration" in caplog.text
    assert "torch._scaled_mm is not used: a trial differs by" in caplog.text


def test_layers_of_one_input_are_one_product() -> None:
    layers, x = [tiled(quantized(size, 256, 256)) for size in (32, 16, 48)], torch.randn(2, 3, 256).to(BF16)
    expected = [layer(x) for layer in layers]
    whole = joined(tuple(layers))
    assert isinstance(whole, LibraryLinear) and whole.out_features == 96
    assert torch.equal(whole(x), torch.cat(expected, -1))
    assert all(torch.equal(layer(x), part) for layer, part in zip(layers, expected, strict=True))
    again = joined(tuple(layers))
    assert isinstance(again, LibraryLinear) and again.product is whole.product
    assert isinstance(joined(tuple(layers[:2])), SeveralWeights)
    with_bias = tiled(quantized(16, 256, 256, bias=True))
    assert isinstance(joined((layers[0], with_bias)), SeveralWeights)


def test_a_decoder_joins_the_layers_that_a_library_multiplies() -> None:
    """And gives the logits of the model's modules, which multiply layer by layer."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "vocab_size": 50}
    model = made(Qwen3Config(**SHAPE | sizes)).to(BF16)
    round_linears(model, CodeFormat.FP8)
    tile_linears(model, BF16, plain=False)
    pools = [
        KVPool(PoolLayout((Group.uniform(TARGET, Segment(2, 1, 16, BF16)),), 16), 8, CPU, None) for _ in "ab"
    ]
    backends = [TritonBackend(pool.layers(TARGET)) for pool in pools]
    modules = TorchRunner(Modules(model, backends[0]), backends[0], CPU, "off", products="")
    expected = [modules.run(Step(step, [1, 3])).logits for step in STEPS]
    products = {id(each.product) for each in model.modules() if isinstance(each, LibraryLinear)}
    assert len(products) == 14
    decoder = CudaDecoder(describe_model(model), backends[1], 128)
    products = {id(each.product) for each in model.modules() if isinstance(each, LibraryLinear)}
    assert len(products) == 8
    ours = CudaRunner(decoder, backends[1], CPU, "", Buckets([1, 2, 4], [1, 3], [1, 2], trees=True))
    for step, logits in zip(STEPS, expected, strict=True):
        near(ours.run(Step(step, [1, 3])).logits, logits, 0.05)


def test_the_start_names_what_multiplies() -> None:
    model = nn.Sequential(quantized(48, 256, 256), quantized(40, 256, 256), nn.Linear(4, 4))
    tile_linears(model, BF16, plain=False)
    assert describe(model.modules(), BF16).split("; ") == [
        "1 layers by torch._scaled_mm",
        "1 layers in tiles, summed alike in every batch",
        "others cuBLAS, bfloat16",
    ]


def test_it_rounds_no_rows() -> None:
    assert rounded(torch.empty(0, 64, dtype=BF16), 1)[0].shape == (0, 64)
