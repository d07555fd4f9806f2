"""Blocks of one layout into a pool of another, against a plain reference that moves one token at a time."""

from __future__ import annotations

import ctypes
import mmap
import multiprocessing

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvtransfer.blocks import scratch
from kvtransfer.blocks.convert import Converter, RangeError, moves
from kvtransfer.blocks.layout import LayoutError, block_bytes
from protocol.handoff import ROW_QUANTIZATIONS, SegmentInfo
from tests.kvtransfer.plain_layout import (
    parts,
    plain_block_bytes,
    random_blocks,
    raw,
    read_token,
    segment,
    write_token,
)

DTYPES = ["float32", "bfloat16", "float16"]


def place_plainly(
    wire: list[SegmentInfo],
    ours: list[SegmentInfo],
    pool: bytearray,
    staged: bytearray,
    positions: list[int],
    block_ids: list[int],
    first_token: int,
    num_tokens: int,
) -> None:
    wire_size, our_size = wire[0].shape[2], ours[0].shape[2]
    wire_bytes, our_bytes = plain_block_bytes(wire), plain_block_bytes(ours)
    for token in range(first_token, num_tokens):
        position, source_slot = divmod(token, wire_size)
        if position not in positions:
            continue
        index, target_slot = divmod(token, our_size)
        source = positions.index(position) * wire_bytes
        target = block_ids[index] * our_bytes
        sources = parts(memoryview(staged)[source : source + wire_bytes], wire)
        targets = parts(memoryview(pool)[target : target + our_bytes], ours)
        for theirs, their, mine, our in zip(sources, wire, targets, ours, strict=True):
            write_token(mine, our, target_slot, read_token(theirs, their, source_slot))


@st.composite
def cases(draw: st.DrawFn) -> tuple:
    wire_size, our_size = draw(
        st.tuples(*[st.integers(1, 12)] * 2) | st.sampled_from([(4, 8), (8, 4), (6, 9)])
    )
    quantization = draw(st.sampled_from(["none", "none", "int8", "fp8"]))
    wire, ours = [], []
    for name in ["target", "target.1", "draft"][: draw(st.integers(1, 3))]:
        layers, heads = draw(st.integers(1, 3)), draw(st.integers(1, 3))
        planes, size = draw(st.integers(1, 2)), draw(st.sampled_from([4, 8]))
        their, our = draw(st.sampled_from(DTYPES)), draw(st.sampled_from(DTYPES))
        stored = {"name": name, "planes": planes}
        wire.append(segment(layers, wire_size, heads, size, dtype=their, quantization=quantization, **stored))
        ours.append(segment(layers, our_size, heads, size, dtype=our, **stored))
    num_tokens = draw(st.integers(0, 60))
    first_token = draw(st.integers(0, num_tokens))
    # One position more than the prompt has: it is outside, like the slots behind the last token.
    positions = draw(st.permutations(range(num_tokens // wire_size + 2)))
    positions = positions[: draw(st.integers(0, len(positions)))]
    if draw(st.booleans()):
        positions = sorted(positions)
    needed = -(-num_tokens // our_size)
    num_blocks = needed + 3
    block_ids = draw(st.permutations(range(num_blocks)) | st.just(list(range(num_blocks))))
    block_ids = block_ids[: needed + draw(st.integers(0, 1))]
    seed, chunk = draw(st.integers(0, 2**32)), draw(st.sampled_from([1, 64, 300, 10**6]))
    return wire, ours, num_tokens, first_token, positions, num_blocks, block_ids, seed, chunk


@settings(max_examples=300, deadline=None)
@given(cases())
def test_place_moves_what_the_reference_moves_and_nothing_else(case: tuple) -> None:
    wire, ours, num_tokens, first_token, positions, num_blocks, block_ids, seed, chunk = case
    generator = torch.Generator().manual_seed(seed)
    staged = random_blocks(wire, len(positions) + 1, generator)
    pool = bytearray(np.random.default_rng(seed).bytes(num_blocks * plain_block_bytes(ours)))
    expected = bytearray(pool)
    place_plainly(wire, ours, expected, staged, positions, block_ids, first_token, num_tokens)
    converter = Converter(wire, ours, memoryview(pool))
    assert converter.wire_block_bytes == plain_block_bytes(wire)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scratch, "CHUNK_VALUES", chunk)
        converter.place(
            memoryview(staged),
            np.array(positions, dtype=np.int64),
            np.array(block_ids, dtype=np.int64),
            first_token,
            num_tokens,
        )
    assert pool == expected


def place_one(wire: SegmentInfo, ours: SegmentInfo, values: torch.Tensor) -> torch.Tensor:
    """One block of these values, converted."""
    pool = bytearray(plain_block_bytes([ours]))
    block = np.zeros(1, dtype=np.int64)
    converter = Converter([wire], [ours], memoryview(pool))
    converter.place(memoryview(bytearray(raw(values))), block, block, 0, ours.shape[2])
    return torch.frombuffer(pool, dtype=getattr(torch, ours.dtype))


def test_bfloat16_becomes_float32_exactly_whatever_its_bits() -> None:
    bits = torch.arange(2**16, dtype=torch.int32).to(torch.int16)
    wire = segment(1, 1024, 1, 32, dtype="bfloat16")
    ours = segment(1, 1024, 1, 32, dtype="float32")
    placed = place_one(wire, ours, bits)
    assert torch.equal(placed.view(torch.int32), bits.to(torch.int32) << 16)


def test_float32_becomes_bfloat16_rounded_to_nearest_even() -> None:
    values = torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-8 + 2**-20, -(1 + 2**-8)])
    placed = place_one(segment(1, 1, 1, 2), segment(1, 1, 1, 2, dtype="bfloat16"), values)
    assert placed.tolist() == [1.0, 1 + 2**-6, 1 + 2**-7, -1.0]


def test_int8_becomes_bfloat16_rounded_to_nearest_even() -> None:
    wire = segment(1, 1, 1, 4, planes=1, dtype="bfloat16", quantization="int8")
    ours = segment(1, 1, 1, 4, planes=1, dtype="bfloat16")
    codes, scale = torch.tensor([1, -1, 3, 0], dtype=torch.int8), torch.tensor([1 + 2**-8])
    placed = place_one(wire, ours, torch.cat([codes.view(torch.uint8), scale.view(torch.uint8)]))
    assert placed.tolist() == [1.0, -1.0, 3 + 2**-6, 0.0]


@pytest.mark.parametrize("bad", [1e6, -7e4, float("inf"), float("nan")])
def test_what_float16_cannot_hold_is_refused(bad: float) -> None:
    values = torch.tensor([1.0, bad, 65504.0, 0.0])
    with pytest.raises(RangeError, match="beyond float16"):
        place_one(segment(1, 1, 1, 2), segment(1, 1, 1, 2, dtype="float16"), values)


@pytest.mark.parametrize(
    ("positions", "block_ids", "num_tokens", "problem"),
    [
        ([0, 1, 2], [0, 1], 8, "staged holds 2 blocks, not 3"),
        ([0], [0, 1], 9, "2 block_ids have no room for 9 tokens"),
        ([0], [0, 5], 8, r"block_ids must be in \[0, 5\)"),
        ([0], [-1, 0], 8, r"block_ids must be in \[0, 5\)"),
        ([-1], [0, 1], 8, "positions must not be negative"),
    ],
)
def test_blocks_that_are_not_there_are_refused(
    positions: list[int], block_ids: list[int], num_tokens: int, problem: str
) -> None:
    ours, wire = segment(1, 4, 1, 4), segment(1, 4, 1, 4, dtype="bfloat16")
    pool = bytearray(5 * plain_block_bytes([ours]))
    converter = Converter([wire], [ours], memoryview(pool))
    with pytest.raises(ValueError, match=problem):
        converter.place(
            memoryview(bytearray(2 * plain_block_bytes([wire]))),
            np.array(positions, dtype=np.int64),
            np.array(block_ids, dtype=np.int64),
            0,
            num_tokens,
        )
    assert not any(pool)


def test_layouts_that_do_not_convert_are_refused_by_name() -> None:
    with pytest.raises(LayoutError, match="kv_heads"):
        Converter([segment(1, 4, 2, 4)], [segment(1, 4, 1, 4)], memoryview(bytearray(1024)))


@pytest.mark.parametrize(("sizes", "most"), [((16, 16), 1), ((16, 32), 2), ((48, 16), 3), ((16, 24), 4)])
def test_ordinary_block_sizes_need_few_copies(sizes: tuple[int, int], most: int) -> None:
    num_tokens = 48 * 100
    positions = np.arange(num_tokens // sizes[0])
    block_ids = np.arange(num_tokens // sizes[1])
    assert len(list(moves(positions, block_ids, sizes, 0, num_tokens))) == most


def place_beside_protected_pages() -> None:
    """A prompt of 40 tokens, 24 of them cached: their pages are read-only, like those behind the prompt.

    A token of a plane is 512 bytes, a page is 4 KiB: 8 tokens of a plane.
    """
    page = mmap.PAGESIZE
    ours, wire = segment(1, 16, 1, page // 32), segment(1, 8, 1, page // 32, dtype="bfloat16")
    pages = mmap.mmap(-1, 4 * plain_block_bytes([ours]))
    address = ctypes.addressof(ctypes.c_char.from_buffer(pages))
    converter = Converter([wire], [ours], memoryview(pages))
    for block, half in [(0, 0), (0, 1), (1, 0), (2, 1), (3, 0), (3, 1)]:
        for plane in (0, 1):
            start = address + (block * 4 + plane * 2 + half) * page
            assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(start), page, mmap.PROT_READ) == 0
    staged = random_blocks([wire], 5, torch.Generator().manual_seed(0))
    converter.place(memoryview(staged), np.arange(5), np.array([0, 1, 2]), 24, 40)
    assert any(pages[5 * page : 6 * page])


def test_the_pages_of_cached_tokens_are_not_written_at_all() -> None:
    """Not even with what they hold: other requests read them meanwhile. A write would be a SIGSEGV."""
    process = multiprocessing.get_context("spawn").Process(target=place_beside_protected_pages)
    process.start()
    process.join(60)
    assert process.exitcode == 0


def rows_and_scales(block: bytearray | memoryview, info: SegmentInfo) -> tuple[Tensor, Tensor]:
    """Codes [layers, planes, block_size, kv_heads, head_dim] of a block in rows, and the bits of their scales
    [layers, planes, block_size, kv_heads].
    """
    layers, planes, block_size, heads, head_dim = info.shape
    tokens = torch.frombuffer(block, dtype=torch.uint8).view(layers, planes, block_size, -1)
    codes = tokens[..., : heads * head_dim].unflatten(3, (heads, head_dim))
    scales = tokens[..., heads * head_dim :].contiguous().view(torch.int32)
    return codes, scales


@pytest.mark.parametrize("block_ids", [[0, 1, 2, 3], [5, 1, 3, 0]], ids=["one after the other", "scattered"])
@pytest.mark.parametrize("sizes", [(6, 12), (16, 16)], ids=str)
@pytest.mark.parametrize("quantization", ROW_QUANTIZATIONS.values())
def test_coded_rows_move_with_their_scales(
    quantization: str, sizes: tuple[int, int], block_ids: list[int]
) -> None:
    kinds = zip(sizes, ("float32", "bfloat16"), strict=True)  # dtypes of what the model computes
    wire, own = (segment(2, size, 3, 4, dtype=dtype, quantization=quantization) for size, dtype in kinds)
    wire_bytes, our_bytes = block_bytes([wire]), block_bytes([own])
    generator = np.random.default_rng(1)
    staged, pool = (bytearray(generator.bytes(count)) for count in (8 * wire_bytes, 6 * our_bytes))
    before, num_tokens = bytearray(pool), 45
    converter = Converter([wire], [own], memoryview(pool))
    converter.place(memoryview(staged), np.arange(45 // sizes[0] + 1), np.array(block_ids), 2, num_tokens)
    changed = 0
    for token in range(num_tokens):
        index, slot = divmod(token, sizes[0])
        codes, scales = rows_and_scales(memoryview(staged)[index * wire_bytes :][:wire_bytes], wire)
        index, place = divmod(token, sizes[1])
        start = block_ids[index] * our_bytes
        for kept, is_there in ((pool, token >= 2), (before, False)):
            to_codes, to_scales = rows_and_scales(memoryview(kept)[start:][:our_bytes], own)
            same = torch.equal(to_codes[:, :, place], codes[:, :, slot])
            assert (same and torch.equal(to_scales[:, :, place], scales[:, :, slot])) == is_there
        changed += codes[:, :, slot].numel() + 4 * scales[:, :, slot].numel() if token >= 2 else 0
    assert sum(a != b for a, b in zip(pool, before, strict=True)) <= changed
