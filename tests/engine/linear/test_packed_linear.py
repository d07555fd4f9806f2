"""Packed linear layers: right to bfloat16's last bit, and the same bits in every batch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from engine.linear import packed
from engine.linear.packed import PackedLinear, kernel_fault, pack_linears
from native.threads import gomp_parallel
from tests.engine.kernels import CPU, needs_kernel

pytestmark = needs_kernel


def layers(in_features: int, out_features: int, bias: bool = True) -> tuple[nn.Linear, PackedLinear]:
    torch.manual_seed(in_features + out_features)
    linear = nn.Linear(in_features, out_features, bias=bias).bfloat16()
    return linear, PackedLinear(linear)


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize(
    ("in_features", "out_features"), [(2, 1), (34, 15), (512, 16), (2, 63), (34, 64), (512, 65), (34, 200)]
)
def test_a_product_is_the_exact_one_rounded(in_features: int, out_features: int) -> None:
    for bias in (False, True):
        linear, ours = layers(in_features, out_features, bias)
        for rows in (1, 5, 6, 7, 16, 17, 32, 33, 200, 500):
            x = torch.randn(rows, in_features).bfloat16()
            exact = x.double() @ linear.weight.double().T
            if bias:
                exact += linear.bias.double()
            scale = x.double().abs() @ linear.weight.double().abs().T + 1
            error = (ours(x).double() - exact).abs()
            assert (error <= exact.abs() * 2**-8 + scale * 2**-20).all(), (rows, bias)


@pytest.mark.usefixtures("kernel", "threads_restored")
def test_a_rows_bits_depend_neither_on_its_batch_nor_on_the_threads() -> None:
    _, ours = layers(256, 300)
    x = torch.randn(400, 256).bfloat16()
    torch.set_num_threads(1)
    alone = torch.cat([ours(row) for row in x.split(1)])
    for threads, sizes in ((1, (2, 5, 6, 17, 400)), (2, (2, 3, 5, 6, 7, 11, 16, 17, 40, 192, 193, 400))):
        torch.set_num_threads(threads)
        for rows in sizes:
            together = torch.cat([ours(some) for some in x.split(rows)])
            assert torch.equal(together, alone), (threads, rows)


def test_a_weight_may_begin_anywhere_in_its_storage() -> None:
    flat = torch.randn(64 * 32 + 1).bfloat16()
    weight = flat[1:].view(64, 32)
    assert torch.equal(packed.pack(weight), packed.pack(weight.clone()))


@pytest.mark.usefixtures("kernel")
def test_nan_and_infinity_stay() -> None:
    _, ours = layers(64, 80)
    x = torch.randn(3, 64).bfloat16()
    sound = ours(x)
    x[1, 5], x[2, 6] = float("nan"), float("inf")
    out = ours(x)
    assert torch.equal(out[0], sound[0])
    assert out[1].isnan().all()
    assert out[2].isinf().all()


@pytest.mark.parametrize(("in_features", "out_features"), [(1, 64), (64, 1), (65, 200), (512, 63)])
def test_a_float32_product_is_exact_and_its_rows_have_the_same_bits_in_every_batch(
    in_features: int, out_features: int
) -> None:
    torch.manual_seed(in_features + out_features)
    weight, bias, x = (
        torch.randn(out_features, in_features),
        torch.randn(out_features),
        torch.randn(200, in_features),
    )
    kernel, values = packed.library().tandem_linear_of_float32, packed.pack(weight, together=1)

    def multiply(rows: torch.Tensor, bias: torch.Tensor | None, threads: int = 1) -> torch.Tensor:
        out = torch.empty(len(rows), out_features)
        added = None if bias is None else bias.data_ptr()
        sizes = len(rows), in_features, out_features, threads
        kernel(rows.data_ptr(), values.data_ptr(), added, out.data_ptr(), *sizes, gomp_parallel())
        return out

    for added in (None, bias):
        whole = multiply(x, added, threads=2)
        exact = x.double() @ weight.double().T + (0 if added is None else added.double())
        scale = x.double().abs() @ weight.double().abs().T + 1
        assert ((whole.double() - exact).abs() <= scale * 2**-20).all()
        for rows in (1, 2, 5, 6, 7, 64):
            assert torch.equal(torch.cat([multiply(some, added) for some in x.split(rows)]), whole), rows


def test_only_plain_bfloat16_layers_are_replaced() -> None:
    class Special(nn.Linear):
        pass

    model = nn.ModuleDict(
        {
            "plain": nn.Linear(8, 8),
            "odd": nn.Linear(7, 8),
            "special": Special(8, 8),
            "inner": nn.Sequential(nn.Linear(8, 4, bias=False), nn.ReLU()),
        }
    ).bfloat16()
    model["float32"] = nn.Linear(8, 8)
    assert pack_linears(model) == 2
    assert isinstance(model["plain"], PackedLinear) and isinstance(model["inner"][0], PackedLinear)
    assert {type(model[name]) for name in ("odd", "float32", "special")} == {nn.Linear, Special}


def test_the_replacement_is_logged(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert "float32" in (kernel_fault(CPU, torch.float32) or "")
    assert "cuda" in (kernel_fault(torch.device("cuda"), torch.bfloat16) or "")
    monkeypatch.setenv("TANDEM_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("CXX", "false")
    packed.library.cache_clear()
    try:
        assert "false" in (kernel_fault(CPU, torch.bfloat16) or "")
    finally:
        packed.library.cache_clear()
