"""Triton kernels on the GPU with their serving tiles, compared with torch's backend in float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from torch import nn

pytest.importorskip("triton", reason="Triton is for Linux")

from engine.devices.cuda import experts as cuda_experts
from engine.devices.cuda.attention.backend import TritonBackend
from engine.devices.cuda.experts import RoutedTiles, Router, routes_of
from engine.devices.cuda.products import TiledLinear
from engine.devices.torch.attention import TorchBackend
from engine.linear.quantized import QuantizedLinear, round_to_nearest
from engine.quantization.weight import CodeFormat
from tests.engine.interpreted.cases import FORMATS, Case, Options, Sequence, Shape, Step, cases
from tests.engine.interpreted.routing import CASES, INPUTS, experts_of

CUDA = torch.device("cuda")
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
OPTIONS = [
    Options(),
    Options(sliding_window=700, sinks=True),
    Options(sliding_window=3, softcap=5.0),
]
LONG = (
    Sequence(1, 1700, 1),
    Sequence(8, 1100, 2),
    Sequence(9, 620, 3, tree=True, earlier=4),
    Sequence(200, 900, 4),
    Sequence(64, 64, 5),
)
"""A decode row and rows to verify over several splits, a tree, a chunk, and a prompt."""


def computed(step: Step) -> torch.Tensor:
    return step.to(CUDA).run(TritonBackend)


def check(case: Case) -> None:
    expected = Step.of(case).in_float64().run(TorchBackend)
    out = computed(Step.of(case)).cpu()
    tolerance = TOLERANCE[case.shape.dtype]
    torch.testing.assert_close(out.double(), expected, atol=tolerance, rtol=tolerance)


@settings(max_examples=200, deadline=None, derandomize=True, database=None)
@given(cases())
def test_small_steps(case: Case) -> None:
    check(case)


SHAPES = [
    Shape(torch.bfloat16, key_dim=key, value_dim=value)
    for key, value in [(64, 64), (256, 256), (512, 512), (192, 128)]
]
LATENT = Shape(torch.bfloat16, "none", 1, 40, 576, 512, values_in_keys=True)


@pytest.mark.parametrize(
    ("shape", "options"),
    [
        *((Shape(*format, 2, 4, 128, 128), options) for format in FORMATS for options in OPTIONS),
        *((shape, OPTIONS[0]) for shape in (*SHAPES, LATENT)),
    ],
    ids=str,
)
def test_long_contexts(shape: Shape, options: Options) -> None:
    check(Case(shape, options, LONG, padding=2))


@pytest.mark.parametrize(("dtype", "quantization"), FORMATS, ids=str)
def test_rows_have_the_same_bits_alone_and_in_a_batch(dtype: torch.dtype, quantization: str) -> None:
    crowd = Case(Shape(dtype, quantization, 2, 4, 128, 128), Options(), LONG * 3)
    together = computed(Step.of(crowd))
    for index in range(len(LONG)):
        alone = computed(Step.of(crowd.alone(index)))
        assert torch.equal(together[crowd.rows_of(index)], alone)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize(
    ("group", "dims", "format"),
    [(4, (128, 128), FORMATS[1]), (4, (128, 128), FORMATS[-1]), (2, (512, 512), FORMATS[1])],
    ids=str,
)
def test_a_row_has_the_same_bits_in_every_chunk(
    group: int, dims: tuple[int, int], format: tuple[torch.dtype, str], options: Options
) -> None:
    """As a decode row, among rows to verify, and in chunks of several sizes."""
    shape = Shape(*format, 2, group, *dims)
    together = computed(Step.of(Case(shape, options, (Sequence(200, 1100, 3),))))
    for rows in (1, 8, 40, 64, 65, 120):
        out = computed(Step.of(Case(shape, options, (Sequence(rows, 1100, 3),))))
        assert torch.equal(out, together[-rows:]), rows


def test_the_pool_gets_the_same_bytes_as_by_torch() -> None:
    for dtype, quantization in FORMATS:
        case = Case(Shape(dtype, quantization), Options(), LONG[:3])
        ours, theirs = Step.of(case).to(CUDA), Step.of(case)
        ours.run(TritonBackend)
        theirs.run(TorchBackend)
        for mine, expected in zip(ours.layer, theirs.layer, strict=True):
            options = {"atol": 0, "rtol": 0, "equal_nan": True, "check_device": False}
            torch.testing.assert_close(mine, expected, **options)  # both are None if KV is not quantized


@pytest.mark.parametrize("format", [None, *CodeFormat], ids=str)
def test_products_in_tiles(format: CodeFormat | None) -> None:
    """A row gives the same bits alone, with few others and with many, for which programs share no sums."""
    torch.manual_seed(0)
    plain = torch.randn(300, 2560, dtype=torch.bfloat16)
    rows = torch.randn(200, 2560, dtype=torch.bfloat16, device=CUDA)
    if format is None:
        tiled, weight = TiledLinear.plain(plain.to(CUDA), None), plain.float()
    else:
        quantized = round_to_nearest(plain.to(CUDA), format, 32)
        tiled, weight = TiledLinear.quantized(quantized, None), quantized.dequantized()
    together = tiled(rows)
    expected = rows.double() @ weight.to(CUDA).double().T
    torch.testing.assert_close(together.double(), expected, atol=0.2, rtol=1.6e-2)
    assert torch.equal(tiled(rows[:9]), together[:9])
    assert all(torch.equal(tiled(rows[row : row + 1])[0], together[row]) for row in (0, 70, 199))


@pytest.mark.parametrize("format", [None, *CodeFormat], ids=str)
def test_experts(format: CodeFormat | None) -> None:
    """A row gives the same bits in tiles of 16 rows and of 64."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(8):
        plain = nn.Linear(512, 192, dtype=torch.bfloat16, device=CUDA)
        if format is None:
            layers.append(plain)
        else:
            layers.append(QuantizedLinear(round_to_nearest(plain.weight.detach(), format, 32), plain.bias))
    experts = RoutedTiles.of(layers, torch.bfloat16)
    rows = torch.randn(600, 512, dtype=torch.bfloat16, device=CUDA)
    chosen = torch.rand(600, 8, device=CUDA).topk(2, dim=1).indices
    together = experts(rows, routes_of(chosen, 8))
    for place, number in enumerate(chosen[:20].flatten().tolist()):
        layer, row = layers[number], rows[place // 2].double()
        weight = layer.weight if format is None else layer.quantized.dequantized()
        expected = row @ weight.double().T + layer.bias.double()
        torch.testing.assert_close(together[place].double(), expected, atol=0.02, rtol=1.6e-2)
    for count in (1, 40):
        assert torch.equal(experts(rows[:count], routes_of(chosen[:count], 8)), together[: 2 * count])


@pytest.mark.parametrize("case", CASES)
def test_routers(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row has the same experts, and bits of their weights, in tiles of 16 rows and of 64."""
    experts = experts_of(case)
    fields = {name: getattr(experts, name) for name in ("router_bias", "preferences", "factors")}
    moved = {name: each.to(CUDA) for name, each in fields.items() if each is not None}
    moved["router"] = experts.router.to(CUDA, torch.bfloat16)
    assert experts.shared_gate is not None
    experts.shared_gate.linears[0].to(CUDA)
    router = Router.of(replace(experts, **moved), shared=True)
    x = torch.randn(300, INPUTS, dtype=torch.bfloat16, device=CUDA)
    monkeypatch.setattr(cuda_experts, "_FEW_EACH", 0)
    _, together = router.routes(x)
    chosen, _ = router.choose(x)
    monkeypatch.setattr(cuda_experts, "_FEW_EACH", 1 << 20)
    for count in (1, 40, 300):
        assert torch.equal(router.routes(x[:count])[1], together[:count])
        assert torch.equal(router.choose(x[:count])[0], chosen[:count])
