"""The meaning of a block's bytes, and the layouts that can be converted."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvtransfer.blocks.layout import (
    CODE_DTYPES,
    BlockLayout,
    LayoutError,
    block_bytes,
    conversion_problem,
    foreign_format,
    tokens_in_blocks,
    wire_segments,
)
from protocol.handoff import ROW_QUANTIZATIONS, SegmentInfo
from tests.kvtransfer.plain_layout import parts, plain_block_bytes, random_blocks, read_token, segment

TARGET = segment(3, 16, 2, 8, dtype="bfloat16")
DRAFT = segment(1, 16, 1, 4, name="draft", dtype="float32")
LATENT = msgspec.structs.replace(TARGET, shape=(3, 1, 16, 1, 12))


@pytest.mark.parametrize("wire_dtype", ["auto", "int8", "fp8"])
@pytest.mark.parametrize("segments", [(TARGET,), (TARGET, DRAFT), (DRAFT, TARGET), (LATENT, DRAFT)])
def test_views_show_the_values_of_the_bytes(segments: tuple[SegmentInfo, ...], wire_dtype: str) -> None:
    wire = wire_segments(segments, wire_dtype)
    layout = BlockLayout(wire)
    assert layout.block_bytes == block_bytes(wire) == plain_block_bytes(wire)
    blocks = random_blocks(wire, 3, torch.Generator().manual_seed(1))
    tensor = layout.blocks(memoryview(blocks))
    assert tensor.shape == (3, layout.block_bytes)
    for index in range(3):
        block = memoryview(blocks)[index * layout.block_bytes : (index + 1) * layout.block_bytes]
        for view, part in zip(layout.segments, parts(block, wire), strict=True):
            values = view.values(tensor)[index].float()
            if view.quantized:
                values = values * view.scales(tensor)[index]
            for slot in range(16):
                expected = read_token(part, view.info, slot).flatten(0, 1)
                assert torch.equal(values[:, slot], expected)


def test_a_quantized_block_of_bf16_takes_at_most_0_53_of_its_bytes() -> None:
    bundled = (segment(4, 16, 2, 64, dtype="bfloat16"),)
    assert block_bytes(wire_segments(bundled, "int8")) <= 0.53 * block_bytes(bundled)
    assert block_bytes(wire_segments(bundled, "fp8")) <= 0.53 * block_bytes(bundled)


def test_the_wire_layout_differs_only_in_quantization() -> None:
    (wire,) = wire_segments([TARGET], "int8")
    assert wire == msgspec.structs.replace(TARGET, quantization="int8")
    assert wire_segments([TARGET], "auto") == (TARGET,)


@pytest.mark.parametrize("wire_dtype", ["int4", "INT8", ""])
def test_an_unknown_wire_dtype_is_refused_by_name(wire_dtype: str) -> None:
    with pytest.raises(LayoutError, match=r"quantization: .* is none of auto, int8, fp8"):
        wire_segments([TARGET], wire_dtype)


def test_opaque_blocks_are_not_quantized() -> None:
    assert wire_segments((), "auto") == ()
    with pytest.raises(LayoutError, match="opaque"):
        wire_segments((), "int8")


def test_a_quantized_pool_is_not_quantized_again() -> None:
    with pytest.raises(LayoutError, match="the pool itself is quantized"):
        wire_segments(wire_segments([TARGET], "fp8"), "int8")


def test_opaque_blocks_have_no_layout() -> None:
    with pytest.raises(LayoutError, match="opaque"):
        block_bytes(())


@pytest.mark.parametrize(
    "changes",
    [
        {"dtype": "float32"},
        {"dtype": "float16"},
        {"quantization": "int8"},
        {"quantization": "fp8", "dtype": "float32"},
    ],
)
def test_convertible_layouts(changes: dict[str, object]) -> None:
    assert conversion_problem([msgspec.structs.replace(TARGET, **changes)], [TARGET]) is None


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


@pytest.mark.parametrize("theirs", [(), (TARGET, DRAFT), (DRAFT, TARGET), (TARGET, TARGET)])
def test_other_segments_are_refused(theirs: tuple[SegmentInfo, ...]) -> None:
    problem = conversion_problem(theirs, (TARGET,))
    assert problem is not None and problem[0] == "segments"


def test_a_long_list_of_names_gives_a_short_reason() -> None:
    theirs = [msgspec.structs.replace(TARGET, name=f"{index:064}") for index in range(100)]
    problem = conversion_problem(theirs, (TARGET,))
    assert problem is not None and len(problem[1]) < 512


def test_segments_of_one_block_share_its_size() -> None:
    odd = msgspec.structs.replace(DRAFT, shape=(1, 2, 8, 1, 4))
    problem = conversion_problem((TARGET, odd), (TARGET, DRAFT))
    assert problem == ("block_size", "the segments of one block differ in it")


def test_nothing_converts_into_a_quantized_pool() -> None:
    (quantized,) = wire_segments([TARGET], "int8")
    problem = conversion_problem([TARGET], [quantized])
    assert problem is not None and problem[0] == "quantization"
    assert conversion_problem([quantized], [quantized]) is None


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


def test_equal_opaque_blocks_need_no_conversion() -> None:
    assert conversion_problem((), ()) is None


@given(st.integers(1, 40), st.integers(0, 200))
def test_tokens_in_blocks(block_size: int, num_tokens: int) -> None:
    positions = np.arange(210)
    counted = [len(range(p * block_size, min((p + 1) * block_size, num_tokens))) for p in positions]
    assert tokens_in_blocks(positions, block_size, num_tokens).tolist() == counted
