"""Chunks of prompts by FlashAttention-3. A reference takes its place, with the arguments and the checks that
the library publishes.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import pytest
import torch
import triton.language as tl
from torch import Tensor

from engine.devices import attention
from engine.devices.attention import select_backend
from engine.devices.cuda import library_products
from engine.devices.cuda.attention import backend, flash, tiles
from engine.devices.cuda.attention.flash import FlashBackend
from engine.devices.torch.attention import TorchBackend
from tests.engine.interpreted.cases import Case, Options, Sequence, Shape, Step

BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def hopper(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let CPU tensors lie on a device of capability 9.0."""
    monkeypatch.setattr(library_products, "capability_of", lambda device: (9, 0))
    monkeypatch.setattr(backend, "MULTIPLIED", dict.fromkeys(backend.MULTIPLIED, tl.float32))
    monkeypatch.setattr(tiles, "CHUNK", 7)
    yield
    flash._flash.cache_clear()
    flash._passes.cache_clear()


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    cache_seqlens: Tensor,
    page_table: Tensor,
    cu_seqlens_q: Tensor,
    max_seqlen_q: int,
    softmax_scale: float,
    causal: bool,
    window_size: tuple[int, int],
    softcap: float,
    num_splits: int,
) -> Tensor:
    """Attend as FlashAttention-3's function of this name does, with the checks of hopper/flash_api.cpp."""
    assert causal and num_splits == 1
    assert q.stride(-1) == k_cache.stride(-1) == v_cache.stride(-1) == page_table.stride(-1) == 1
    assert q.dtype is k_cache.dtype and q.shape[-1] % 8 == 0 and q.shape[1] % k_cache.shape[2] == 0
    for indices in (cache_seqlens, page_table, cu_seqlens_q):
        assert indices.dtype is torch.int32
    assert cache_seqlens.is_contiguous() and cu_seqlens_q.is_contiguous()
    assert len(page_table) == len(cache_seqlens) == len(cu_seqlens_q) - 1
    out = torch.empty_like(q)
    starts = cu_seqlens_q.tolist()
    assert starts[0] == 0 and starts[-1] == len(q)
    for s, keys in enumerate(cache_seqlens.tolist()):
        rows = slice(starts[s], starts[s + 1])
        count = starts[s + 1] - starts[s]
        assert count <= max_seqlen_q
        pages = page_table[s, : -(-keys // k_cache.shape[1])].long()
        k, v = (
            cache[pages].flatten(0, 1)[:keys].float().repeat_interleave(q.shape[1] // cache.shape[2], 1)
            for cache in (k_cache, v_cache)
        )
        scores = torch.einsum("rhd,khd->hrk", q[rows].float(), k) * softmax_scale
        if softcap:
            scores = softcap * (scores / softcap).tanh()
        place = torch.arange(count)[:, None] + keys - count
        distance = place - torch.arange(keys)
        seen = distance >= 0
        if window_size != (-1, -1):
            seen &= distance <= window_size[0]
        scores = scores.masked_fill(~seen, -torch.inf)
        out[rows] = torch.einsum("hrk,khd->rhd", scores.softmax(-1), v).to(q.dtype)
    return out


@pytest.fixture
def attended(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Install a stand-in of FlashAttention-3; return the numbers of rows for which it is called."""
    found: list[int] = []

    def counted(q: Tensor, *args: Any, **options: Any) -> Tensor:
        found.append(len(q))
        return flash_attn_with_kvcache(q, *args, **options)

    module = ModuleType(library_products.FLASH.package)
    module.__spec__ = ModuleSpec(module.__name__, None)
    module.flash_attn_with_kvcache = counted  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return found


SEQUENCES = (
    Sequence(9, 40, 1),
    Sequence(1, 30, 2),
    Sequence(8, 8, 3),
    Sequence(12, 75, 4),
    Sequence(6, 50, 5, tree=True),
)
"""A chunk, rows to decode, two adjacent chunks, and a tree to verify."""


@pytest.mark.parametrize("dtype", [torch.float32, BF16], ids=str)
@pytest.mark.parametrize(
    "options",
    [Options(), Options(sliding_window=20), Options(sliding_window=3, softcap=5.0), Options(scale=1.0)],
    ids=str,
)
def test_flash_attends_for_chunks_alone(dtype: torch.dtype, options: Options, attended: list[int]) -> None:
    step = Step.of(Case(Shape(dtype, key_dim=64, value_dim=64), options, SEQUENCES, padding=2))
    expected = step.in_float64().run(TorchBackend)
    found = step.run(FlashBackend)
    tolerance = 1e-6 if dtype is torch.float32 else 1.6e-2
    torch.testing.assert_close(found.double(), expected, atol=tolerance, rtol=tolerance)
    assert attended == [70, 9, 20]  # the trial, and the step


@pytest.mark.parametrize(
    ("shape", "options", "sequences"),
    [
        (Shape(), Options(sinks=True), SEQUENCES[:2]),
        (Shape(quantization="fp8_row_scales"), Options(), SEQUENCES[:2]),
        (Shape(key_dim=40, value_dim=24), Options(), SEQUENCES[:2]),
        (Shape(), Options(), (Sequence(9, 40, 1, first_key=3),)),
        (Shape(), Options(), SEQUENCES[1:2]),
    ],
    ids=["sinks", "coded", "values of another size", "first keys", "no chunk"],
)
def test_our_kernels_attend_for_all_others(
    shape: Shape, options: Options, sequences: tuple[Sequence, ...], attended: list[int]
) -> None:
    step = Step.of(Case(shape, options, sequences))
    assert torch.equal(step.run(FlashBackend), step.run(backend.TritonBackend))
    assert set(attended) <= {70}


def test_a_flash_that_fails_its_trial_is_not_used(attended: list[int]) -> None:
    sys.modules[library_products.FLASH.package].flash_attn_with_kvcache = lambda q, *_, **__: q  # type: ignore[attr-defined]
    step = Step.of(Case(Shape(key_dim=64, value_dim=64), Options(), SEQUENCES[:1]))
    assert torch.equal(step.run(FlashBackend), step.run(backend.TritonBackend))


def test_auto_takes_flash_unless_it_must_be_deterministic(
    monkeypatch: pytest.MonkeyPatch, attended: list[int]
) -> None:
    monkeypatch.setattr(backend, "triton_fault", lambda device: None)
    monkeypatch.setattr(attention, "kernel_of", lambda device: "triton")
    cpu = torch.device("cpu")
    chosen, why = select_backend(cpu, BF16, "auto", deterministic=False)
    assert chosen is FlashBackend and "FlashAttention-3" in why and not chosen.deterministic
    assert select_backend(cpu, BF16, "auto", deterministic=True)[0] is not FlashBackend
    assert select_backend(cpu, torch.float32, "auto", deterministic=False)[0] is not FlashBackend
    assert select_backend(cpu, BF16, "flash")[0] is FlashBackend
    monkeypatch.delitem(sys.modules, library_products.FLASH.package)
    with pytest.raises(ValueError, match="FlashAttention-3 needs the package flash_attn_interface"):
        select_backend(cpu, BF16, "flash")
    monkeypatch.setattr(library_products, "capability_of", lambda device: (10, 0))
    with pytest.raises(ValueError, match=r"FlashAttention-3 does not run on compute capability 10\.0"):
        select_backend(cpu, BF16, "flash")
