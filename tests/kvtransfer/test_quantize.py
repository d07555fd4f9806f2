"""Blocks packed for the wire: codes, scales, unused slots, and values that cannot be encoded."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvtransfer.blocks import codes, convert
from kvtransfer.blocks.convert import NonFiniteError, Quantizer
from kvtransfer.blocks.layout import BlockLayout
from protocol.handoff import SegmentInfo
from tests.kvtransfer.plain_layout import plain_block_bytes, random_blocks, raw, segment

DTYPES = ["float32", "bfloat16", "float16"]
LARGEST = {"int8": 127.0, "fp8": 448.0}


def pack(
    segments: Sequence[SegmentInfo],
    pool: bytearray,
    wire_dtype: str,
    blocks: Sequence[int],
    num_tokens: Sequence[int],
) -> bytearray:
    quantizer = Quantizer(segments, wire_dtype)
    out = bytearray(b"\x55" * (len(blocks) * quantizer.wire_block_bytes))
    assert quantizer.wire_block_bytes == plain_block_bytes(quantizer.wire)
    quantizer.pack(memoryview(pool), np.array(blocks), np.array(num_tokens), memoryview(out))
    return out


def pack_one(values: Tensor, wire_dtype: str, num_tokens: int | None = None) -> tuple[Tensor, Tensor]:
    """Return the codes and scales, as float32, of a block [layers, 2, block_size, kv_heads, head_dim]."""
    layers, _, block_size, heads, head_dim = values.shape
    info = segment(layers, block_size, heads, head_dim, dtype=str(values.dtype).removeprefix("torch."))
    used = block_size if num_tokens is None else num_tokens
    packed = pack([info], bytearray(raw(values)), wire_dtype, [0], [used])
    layout = BlockLayout(Quantizer([info], wire_dtype).wire)
    blocks = layout.blocks(memoryview(packed))
    (view,) = layout.segments
    return view.values(blocks)[0].float().view(values.shape), view.scales(blocks)[0].view(layers, 2, heads)


@st.composite
def packings(draw: st.DrawFn) -> tuple:
    block_size = draw(st.integers(1, 9))
    segments = [
        segment(
            draw(st.integers(1, 3)),
            block_size,
            draw(st.integers(1, 3)),
            draw(st.sampled_from([4, 8])),
            name=name,
            dtype=draw(st.sampled_from(DTYPES)),
        )
        for name in ["target", "draft"][: draw(st.integers(1, 2))]
    ]
    blocks = draw(st.lists(st.integers(0, 7), max_size=10) | st.just(list(range(8))))
    num_tokens = [draw(st.integers(0, block_size)) if draw(st.booleans()) else block_size for _ in blocks]
    return (
        segments,
        blocks,
        num_tokens,
        draw(st.integers(0, 2**32)),
        draw(st.sampled_from([1, 64, 500, 10**6])),
    )


@settings(max_examples=200, deadline=None)
@given(packings(), st.sampled_from(["int8", "fp8"]))
def test_codes_and_scales_follow_the_definition(case: tuple, wire_dtype: str) -> None:
    segments, blocks, num_tokens, seed, chunk = case
    pool = random_blocks(segments, 8, torch.Generator().manual_seed(seed))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(convert, "CHUNK_VALUES", chunk)
        packed = pack(segments, pool, wire_dtype, blocks, num_tokens)
    wire = BlockLayout(Quantizer(segments, wire_dtype).wire)
    ours = BlockLayout(segments)
    for row, (block, used) in enumerate(zip(blocks, num_tokens, strict=True)):
        for source, target in zip(ours.segments, wire.segments, strict=True):
            values = source.values(ours.blocks(memoryview(pool)))[block].float()
            coded = target.values(wire.blocks(memoryview(packed)))[row].float()
            scales = target.scales(wire.blocks(memoryview(packed)))[row]
            largest = values[:, :used].abs().amax((1, 3), keepdim=True) if used else torch.zeros_like(scales)
            torch.testing.assert_close(scales, largest / LARGEST[wire_dtype], rtol=1e-6, atol=0)
            step = scales / 2 if wire_dtype == "int8" else values.abs() / 16 + scales * 2**-10
            assert (
                (coded * scales - values)[:, :used].abs() <= (step * 1.001).expand_as(values)[:, :used]
            ).all()
            assert (coded[:, used:] == 0).all()


@settings(max_examples=100, deadline=None)
@given(packings())
def test_compiled_codes_equal_torchs_bit_by_bit(case: tuple) -> None:
    segments, blocks, num_tokens, seed, _ = case
    pool = random_blocks(segments, 8, torch.Generator().manual_seed(seed))
    packed = pack(segments, pool, "int8", blocks, num_tokens)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(codes, "compiled", lambda *_: False)
        assert packed == pack(segments, pool, "int8", blocks, num_tokens)


@pytest.mark.parametrize("wire_dtype", ["int8", "fp8"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("garbage", [float("nan"), float("inf"), -6e4])
def test_unused_slots_neither_count_nor_move(wire_dtype: str, dtype: str, garbage: float) -> None:
    values = torch.randn((2, 2, 8, 2, 4), generator=torch.Generator().manual_seed(0)).to(
        getattr(torch, dtype)
    )
    dirty = values.clone()
    dirty[:, :, 5:] = garbage
    values[:, :, 5:] = 0
    clean = pack_one(values, wire_dtype)
    for got, expected in zip(pack_one(dirty, wire_dtype, num_tokens=5), clean, strict=True):
        assert torch.equal(got, expected)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), 2e38])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("wire_dtype", ["int8", "fp8"])
def test_values_without_a_code_are_refused_by_name(
    bad: float, dtype: str, wire_dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(convert, "CHUNK_VALUES", 1)
    values = torch.ones((3, 2, 4, 2, 4), dtype=getattr(torch, dtype))
    values[2, 1, 3, 0, 2] = bad
    with pytest.raises(NonFiniteError, match="block 0, segment target, layer 2, V, head 0"):
        pack_one(values, wire_dtype)


def test_a_group_of_zeros_stays_zero_and_changes_no_other() -> None:
    values = torch.randn((1, 2, 4, 2, 4))
    values[:, 0, :, 1] = 0
    values[:, 1, :, 0] *= 1e-35
    coded, scales = pack_one(values, "int8")
    assert (coded[:, 0, :, 1] == 0).all() and (coded[:, 1, :, 0] == 0).all()
    assert scales[0].tolist() == [
        [pytest.approx(values[0, 0, :, 0].abs().max().item() / 127), 0],
        [0, scales[0, 1, 1].item()],
    ]
    assert scales[0, 1, 1] > 0


@pytest.mark.parametrize("magnitude", [1e-29, 1e-10, 1.0, 6e4, 9e37])
@pytest.mark.parametrize(("wire_dtype", "tolerance"), [("int8", 0.005), ("fp8", 0.065)])
def test_small_and_large_numbers_have_the_same_relative_error(
    magnitude: float, wire_dtype: str, tolerance: float
) -> None:
    values = torch.linspace(0.2, 1.0, 32).view(1, 2, 4, 1, 4) * magnitude
    codes, scales = pack_one(values, wire_dtype)
    error = (codes * scales.view(1, 2, 1, 1, 1) - values).abs().max().item()
    assert error <= tolerance * magnitude
