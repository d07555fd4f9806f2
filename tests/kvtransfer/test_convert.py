"""The meaning of a block's bytes, and blocks of one layout converted into another or packed for the wire."""

from __future__ import annotations

import ctypes
import mmap
import multiprocessing
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvtransfer.blocks import convert
from kvtransfer.blocks.convert import Converter, RangeError
from kvtransfer.blocks.layout import (
    CODE_DTYPES,
    LayoutError,
    block_bytes,
    conversion_problem,
    foreign_format,
    tokens_in_blocks,
    wire_segments,
)
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

TARGET = segment(3, 16, 2, 8, dtype="bfloat16")
DRAFT = segment(1, 16, 1, 4, name="draft", dtype="float32")


def test_the_wire_layout_differs_only_in_quantization() -> None:
    assert wire_segments([TARGET], "auto") == (TARGET,) and wire_segments((), "auto") == ()
    bundled = segment(4, 16, 2, 64, dtype="bfloat16")
    for wire_dtype in ("int8", "fp8"):
        wire = wire_segments([bundled], wire_dtype)
        assert wire == (msgspec.structs.replace(bundled, quantization=wire_dtype),)
        assert block_bytes(wire) <= 0.53 * block_bytes([bundled])


@pytest.mark.parametrize(
    ("segments", "wire_dtype", "reason"),
    [
        *(([TARGET], name, r"quantization: .* is none of auto, int8, fp8") for name in ("int4", "INT8", "")),
        ([], "int8", "opaque"),
        (wire_segments([TARGET], "fp8"), "int8", "the pool itself is quantized"),
    ],
)
def test_impossible_wires_are_refused_by_name(
    segments: list[SegmentInfo], wire_dtype: str, reason: str
) -> None:
    with pytest.raises(LayoutError, match=reason):
        wire_segments(segments, wire_dtype)
    with pytest.raises(LayoutError, match="opaque"):
        block_bytes(())


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"name": "draft"}, "segments"),
        ({"kind": "state"}, "kind"),
        ({"kind": "windowed"}, "kind"),
        ({"block_pool": 1}, "block_pool"),
        ({"dtype": "float64"}, "dtype"),
        ({"dtype": "int8"}, "dtype"),
        ({"quantization": "int4"}, "quantization"),
        ({"shape": (2, 2, 16, 2, 8)}, "layers"),
        ({"shape": (3, 2, 16, 4, 8)}, "kv_heads"),
        ({"shape": (3, 2, 16, 2, 16)}, "head_dim"),
        ({"shape": (3, 2, 32, 2, 8)}, "block_size"),
        ({"shape": (3, 2, 1025, 2, 8)}, "block_size"),
        ({"shape": (3, 2, 2**62, 2, 8)}, "block_size"),
        ({"shape": (3, 1, 16, 2, 8)}, "planes"),
        ({"shape": (3, 2, 0, 2, 8)}, "shape"),
        ({"shape": (3, 2, -16, 2, 8)}, "shape"),
        ({"shape": (3, 2, 16, 16)}, "shape"),
        ({"shape": ()}, "shape"),
        ({"shape": (1, 2, 1, 1, 1)}, "shape"),
    ],
)
def test_unconvertible_layouts_are_refused_by_name(changes: dict[str, object], field: str) -> None:
    problem = conversion_problem([msgspec.structs.replace(TARGET, **changes)], [TARGET])
    assert problem is not None and problem[0] == field
    assert 0 < len(problem[1]) < 512


QUANTIZED = wire_segments([TARGET], "int8")
MANY = tuple(msgspec.structs.replace(TARGET, name=f"{index:064}") for index in range(100))
ODD = msgspec.structs.replace(DRAFT, shape=(1, 2, 8, 1, 4))


@pytest.mark.parametrize(
    ("theirs", "ours", "field"),
    [
        *((theirs, (TARGET,), "segments") for theirs in ((), (TARGET, DRAFT), (TARGET, TARGET), MANY)),
        ((TARGET, ODD), (TARGET, DRAFT), "block_size"),
        ((TARGET,), QUANTIZED, "quantization"),
    ],
    ids=["none", "more", "twice", "many", "sizes", "quantized"],
)
def test_other_segments_are_refused(
    theirs: tuple[SegmentInfo, ...], ours: tuple[SegmentInfo, ...], field: str
) -> None:
    problem = conversion_problem(theirs, ours)
    assert problem is not None and problem[0] == field and len(problem[1]) < 512


def test_convertible_layouts() -> None:
    assert conversion_problem((), ()) is conversion_problem(QUANTIZED, QUANTIZED) is None
    for dtype, quantization in (
        ("float32", "none"),
        ("float16", "none"),
        ("bfloat16", "int8"),
        ("float32", "fp8"),
    ):
        theirs = msgspec.structs.replace(TARGET, dtype=dtype, quantization=quantization)
        assert conversion_problem([theirs], [TARGET]) is None


@pytest.mark.parametrize("name", ROW_QUANTIZATIONS)
def test_a_pool_in_rows_only_takes_blocks_in_rows(name: str) -> None:
    ours = msgspec.structs.replace(TARGET, quantization=ROW_QUANTIZATIONS[name])
    assert block_bytes([ours]) == 3 * 2 * 16 * 2 * (8 + 4)
    assert conversion_problem([msgspec.structs.replace(ours, dtype="float32")], [ours]) is None
    unlike = [TARGET, *(msgspec.structs.replace(TARGET, quantization=other) for other in CODE_DTYPES)]
    pairs = [(their, ours, f"has --kv-cache-dtype auto, here it is {name};") for their in unlike]
    for their, our, reason in [*pairs, (ours, TARGET, f"has --kv-cache-dtype {name}, here it is auto;")]:
        problem = conversion_problem([their], [our])
        assert problem is not None and problem[0] == "quantization" and reason in problem[1]
    with pytest.raises(LayoutError, match="--kv-wire-dtype auto"):
        wire_segments([ours], "int8")
    assert foreign_format([ours], [ours]) == ""
    assert foreign_format([msgspec.structs.replace(ours, dtype="float32")], [ours]) != ""


@given(st.integers(1, 40), st.integers(0, 200))
def test_tokens_in_blocks(block_size: int, num_tokens: int) -> None:
    positions = np.arange(210)
    counted = [len(range(p * block_size, min((p + 1) * block_size, num_tokens))) for p in positions.tolist()]
    assert tokens_in_blocks(positions, block_size, num_tokens).tolist() == counted


DTYPES = ["float32", "bfloat16", "float16"]


def place_plainly(
    wire: list[SegmentInfo],
    ours: list[SegmentInfo],
    pool: bytearray,
    staged: bytearray,
    positions: list[int],
    block_ids: list[int],
    num_tokens: int,
) -> None:
    wire_bytes, our_bytes = plain_block_bytes(wire), plain_block_bytes(ours)
    for token in range(num_tokens):
        position, slot = divmod(token, ours[0].shape[2])
        if position not in positions:
            continue
        source = positions.index(position) * wire_bytes
        target = block_ids[position] * our_bytes
        sources = parts(memoryview(staged)[source : source + wire_bytes], wire)
        targets = parts(memoryview(pool)[target : target + our_bytes], ours)
        for theirs, their, mine, our in zip(sources, wire, targets, ours, strict=True):
            write_token(mine, our, slot, read_token(theirs, their, slot))


@st.composite
def cases(draw: st.DrawFn) -> tuple:
    block_size = draw(st.integers(1, 12))
    quantization = draw(st.sampled_from(["none", "none", "int8", "fp8"]))
    wire, ours = [], []
    for name in ["target", "target.1", "draft"][: draw(st.integers(1, 3))]:
        layers, heads = draw(st.integers(1, 3)), draw(st.integers(1, 3))
        planes, size = draw(st.integers(1, 2)), draw(st.sampled_from([4, 8]))
        their, our = draw(st.sampled_from(DTYPES)), draw(st.sampled_from(DTYPES))
        stored: dict[str, Any] = {"name": name, "planes": planes}
        wire.append(
            segment(layers, block_size, heads, size, dtype=their, quantization=quantization, **stored)
        )
        ours.append(segment(layers, block_size, heads, size, dtype=our, **stored))
    num_tokens = draw(st.integers(0, 60))
    # The position after the prompt's end counts as outside, like the unused slots of the last block.
    positions = draw(st.permutations(range(num_tokens // block_size + 2)))
    positions = positions[: draw(st.integers(0, len(positions)))]
    if draw(st.booleans()):
        positions = sorted(positions)
    needed = -(-num_tokens // block_size)
    num_blocks = needed + 3
    block_ids = draw(st.permutations(range(num_blocks)) | st.just(list(range(num_blocks))))
    block_ids = block_ids[: needed + draw(st.integers(0, 1))]
    seed, chunk = draw(st.integers(0, 2**32)), draw(st.sampled_from([1, 64, 300, 10**6]))
    return wire, ours, num_tokens, positions, num_blocks, block_ids, seed, chunk


@settings(max_examples=300, deadline=None)
@given(cases())
def test_place_moves_the_same_as_the_reference_and_nothing_else(case: tuple) -> None:
    wire, ours, num_tokens, positions, num_blocks, block_ids, seed, chunk = case
    generator = torch.Generator().manual_seed(seed)
    staged = random_blocks(wire, len(positions) + 1, generator)
    pool = bytearray(np.random.default_rng(seed).bytes(num_blocks * plain_block_bytes(ours)))
    expected = bytearray(pool)
    place_plainly(wire, ours, expected, staged, positions, block_ids, num_tokens)
    converter = Converter(wire, ours, memoryview(pool))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(convert, "CHUNK_VALUES", chunk)
        converter.place(
            memoryview(staged),
            np.array(positions, dtype=np.int64),
            np.array(block_ids, dtype=np.int64),
            num_tokens,
        )
    assert pool == expected


def place_one(wire: SegmentInfo, ours: SegmentInfo, values: torch.Tensor) -> torch.Tensor:
    """Return one converted block of these values."""
    pool = bytearray(plain_block_bytes([ours]))
    block = np.zeros(1, dtype=np.int64)
    converter = Converter([wire], [ours], memoryview(pool))
    converter.place(memoryview(bytearray(raw(values))), block, block, ours.shape[2])
    return torch.frombuffer(pool, dtype=getattr(torch, ours.dtype))


@pytest.mark.parametrize("bad", [1e6, -7e4, float("inf"), float("nan")])
def test_values_beyond_float16_are_refused(bad: float) -> None:
    values = torch.tensor([1.0, bad, 65504.0, 0.0])
    with pytest.raises(RangeError, match="beyond float16"):
        place_one(segment(1, 1, 1, 2), segment(1, 1, 1, 2, dtype="float16"), values)


def test_a_converter_refuses_unconvertible_layouts() -> None:
    with pytest.raises(LayoutError, match="kv_heads"):
        Converter([segment(1, 4, 2, 4)], [segment(1, 4, 1, 4)], memoryview(bytearray(1024)))


def place_beside_protected_pages() -> None:
    """Place blocks 1 and 2 of 40 tokens; pages of the first block and beyond the last token are read-only."""
    page = mmap.PAGESIZE
    ours, wire = segment(1, 16, 1, page // 32), segment(1, 16, 1, page // 32, dtype="bfloat16")
    pages = mmap.mmap(-1, 4 * plain_block_bytes([ours]))
    address = ctypes.addressof(ctypes.c_char.from_buffer(pages))
    converter = Converter([wire], [ours], memoryview(pages))
    for block, half in [(0, 0), (0, 1), (2, 1), (3, 0), (3, 1)]:
        for plane in (0, 1):
            start = address + (block * 4 + plane * 2 + half) * page
            assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(start), page, mmap.PROT_READ) == 0
    staged = random_blocks([wire], 2, torch.Generator().manual_seed(0))
    converter.place(memoryview(staged), np.array([1, 2]), np.array([0, 1, 2]), 40)
    assert any(pages[5 * page : 6 * page])


def test_the_pages_of_cached_tokens_are_not_written_at_all() -> None:
    """Other requests read them meanwhile, so not even the same bytes may be written (SIGSEGV)."""
    process = multiprocessing.get_context("spawn").Process(target=place_beside_protected_pages)
    process.start()
    process.join(60)
    assert process.exitcode == 0


def rows_and_scales(block: bytearray | memoryview, info: SegmentInfo) -> tuple[Tensor, Tensor]:
    """Return codes [layers, planes, block_size, heads, head_dim] of a block in rows, and scales' bits."""
    layers, planes, block_size, heads, head_dim = info.shape
    tokens = torch.frombuffer(block, dtype=torch.uint8).view(layers, planes, block_size, -1)
    codes = tokens[..., : heads * head_dim].unflatten(3, (heads, head_dim))
    scales = tokens[..., heads * head_dim :].contiguous().view(torch.int32)
    return codes, scales


@pytest.mark.parametrize("block_ids", [[0, 1, 2, 3], [5, 1, 3, 0]], ids=["one after the other", "scattered"])
@pytest.mark.parametrize("quantization", ROW_QUANTIZATIONS.values())
def test_quantized_rows_move_with_their_scales(quantization: str, block_ids: list[int]) -> None:
    dtypes = ("float32", "bfloat16")  # the models' compute dtypes
    wire, own = (segment(2, 16, 3, 4, dtype=dtype, quantization=quantization) for dtype in dtypes)
    wire_bytes, our_bytes = block_bytes([wire]), block_bytes([own])
    generator = np.random.default_rng(1)
    staged, pool = (bytearray(generator.bytes(count)) for count in (8 * wire_bytes, 6 * our_bytes))
    before, num_tokens = bytearray(pool), 45
    converter = Converter([wire], [own], memoryview(pool))
    converter.place(memoryview(staged), np.arange(3), np.array(block_ids), num_tokens)
    changed = 0
    for token in range(num_tokens):
        index, slot = divmod(token, 16)
        codes, scales = rows_and_scales(memoryview(staged)[index * wire_bytes :][:wire_bytes], wire)
        start = block_ids[index] * our_bytes
        for kept, is_there in ((pool, True), (before, False)):
            to_codes, to_scales = rows_and_scales(memoryview(kept)[start:][:our_bytes], own)
            same = torch.equal(to_codes[:, :, slot], codes[:, :, slot])
            assert (same and torch.equal(to_scales[:, :, slot], scales[:, :, slot])) == is_there
        changed += codes[:, :, slot].numel() + 4 * scales[:, :, slot].numel()
    assert sum(a != b for a, b in zip(pool, before, strict=True)) <= changed
