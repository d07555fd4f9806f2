"""Decode steps take few launches, the host one, and steps with chunks wait for nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton is for Linux")

from engine.devices.cuda.attention import flash
from engine.devices.cuda.attention.flash import FlashBackend
from engine.devices.cuda.fp8_products import Fp8Product
from engine.kv.attention import AttentionMetadata, AttentionOptions, LayerKv
from tests.docs.gpu_table import meta
from tests.engine.absent_gpu import absent_gpu
from tests.engine.launches import FAMILIES, LAYERS, launches_of

DOCUMENT = Path(__file__).parents[3] / "docs" / "gpu.md"
MOST = 450


@pytest.mark.parametrize("family", FAMILIES)
def test_a_decode_step_is_a_graph_of_as_many_launches_as_documented(family: str) -> None:
    found = launches_of(family)
    assert found.is_graph
    assert found.count <= MOST, f"{found.count} for {LAYERS} layers"
    assert f"| {family} | {found.forward} | {found.count} | yes |" in DOCUMENT.read_text()


BF16 = torch.bfloat16


@pytest.mark.parametrize("groups", [1, 32])
def test_an_fp8_product_is_two_launches(groups: int) -> None:
    codes = torch.empty(512, 4096, dtype=torch.float8_e4m3fn, device="meta")
    product = Fp8Product(4096, codes, meta(groups, 512, dtype=torch.float32), None, None)
    with absent_gpu() as gpu:
        assert product(meta(9, 4096, dtype=BF16)).shape == (9, 512)
    assert not gpu.waits and not gpu.uploads
    assert gpu.launches == {"round_rows": 1, "_scaled_mm": 1}


def test_a_step_with_chunks_waits_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def attend(q: Tensor, *_: Any, page_table: Tensor, **__: Any) -> Tensor:
        assert page_table.shape == (2, 10)
        return torch.empty_like(q)

    monkeypatch.setattr(flash, "_passes", lambda *_: True)
    monkeypatch.setattr(flash, "_flash", lambda: attend)
    both = meta(40, 2, 16, 8, 128, dtype=BF16)
    backend = FlashBackend([LayerKv.of(both)])
    metadata = AttentionMetadata(
        query_start=meta(4),
        context_len=meta(3),
        block_table=meta(3, 10),
        slot_mapping=meta(171, dtype=torch.int64),
        max_query_len=100,
        max_context_len=160,
        query_lens=[1, 70, 100],
    )
    query, key, value = (meta(171, heads, 128, dtype=BF16) for heads in (32, 8, 8))
    with absent_gpu() as gpu:
        backend.plan(metadata)
        backend.begin_step(metadata)
        backend.forward(0, query, key, value, AttentionOptions(0.1))
    assert not gpu.waits and not gpu.uploads
    assert gpu.launches["attend"] == 1  # for the row to decode
