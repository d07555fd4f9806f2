"""Cutting and coalescing extents, and the buffers made of them, against the plain list of pairs."""

from __future__ import annotations

from itertools import count

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtransfer.extents import (
    Runs,
    ScatterList,
    coalesce,
    cut,
    expand,
    from_wire,
    num_blocks,
    packed,
    targets_of,
    to_wire,
    views,
)
from protocol.errors import ProtocolError

NUM_BLOCKS = 40
block_indices = st.integers(0, NUM_BLOCKS - 1)


@st.composite
def extents(draw: st.DrawFn) -> list[tuple[int, int]]:
    pairs: list[tuple[int, int]] = []
    for source, target, length in draw(st.lists(st.tuples(block_indices, block_indices, st.integers(1, 12)))):
        length = min(length, NUM_BLOCKS - source, NUM_BLOCKS - target)
        pairs += [(source + i, target + i) for i in range(length)]
    return pairs


def unrolled(runs: Runs) -> list[tuple[int, int]]:
    first, second = expand(runs[:, 0], runs[:, 2]).tolist(), expand(runs[:, 1], runs[:, 2]).tolist()
    return list(zip(first, second, strict=True))


@given(extents(), st.integers(0, 9), st.integers(1, 30))
def test_pieces_hold_the_same_blocks_in_order(
    pairs: list[tuple[int, int]], first: int, max_blocks: int
) -> None:
    sources, ours = [source for source, _ in pairs], np.asarray([target for _, target in pairs])
    pieces = cut(sources, first, NUM_BLOCKS, max_blocks)
    assert all(1 <= num_blocks(runs) <= max_blocks for runs in pieces)
    assert [pair for runs in pieces for pair in unrolled(runs)] == list(
        zip(sources, count(first), strict=False)
    )
    targets = [
        pair for runs in cut(sources, 0, NUM_BLOCKS, max_blocks) for pair in unrolled(targets_of(runs, ours))
    ]
    assert targets == pairs
    for runs in pieces:
        assert unrolled(packed(runs)) == list(zip(expand(runs[:, 0], runs[:, 2]), count(), strict=False))


@given(extents())
def test_no_two_neighbouring_runs_could_be_one(pairs: list[tuple[int, int]]) -> None:
    runs = coalesce(np.asarray(pairs, dtype=np.int64).reshape(-1, 2))
    ends = runs[:, :2] + runs[:, 2:]
    assert not (ends[:-1] == runs[1:, :2]).all(axis=1).any()


@given(extents(), st.integers(1, 5))
def test_wire_form_round_trips(pairs: list[tuple[int, int]], max_blocks: int) -> None:
    for runs in cut([source for source, _ in pairs], 0, NUM_BLOCKS, max_blocks):
        assert (from_wire(to_wire(runs), NUM_BLOCKS, max_blocks) == runs).all()


@given(extents(), st.integers(1, 7), st.randoms())
def test_a_scatter_list_moves_every_byte_once(pairs: list[tuple[int, int]], block_bytes: int, rng) -> None:
    source = memoryview(bytes(rng.randbytes(NUM_BLOCKS * block_bytes)))
    expected = b"".join(source[s * block_bytes : (s + 1) * block_bytes] for s, _ in pairs)
    runs = coalesce(np.asarray(pairs, dtype=np.int64).reshape(-1, 2))
    rest = ScatterList([views(source, block_bytes, runs[:, 0], runs[:, 2])])
    moved = b""
    assert rest.remaining == len(expected)
    while rest.remaining:
        batch = b"".join(rest.batch())
        taken = rng.randint(1, len(batch))
        moved += batch[:taken]
        rest.advance(taken)
    assert moved == expected


@pytest.mark.parametrize(
    ("runs", "problem"),
    [
        ([(0, 0, 0)], "no length"),
        ([(-1, 0, 1)], "negative"),
        ([(0, -1, 1)], "negative"),
        ([(0, 0, -5)], "no length"),
        ([(NUM_BLOCKS - 1, 0, 2)], "leaves"),
        ([(2**31 - 1, 0, 2**31 - 1)], "leaves"),
        ([(0, 0, 9), (0, 0, 2)], "over the limit"),
    ],
)
def test_impossible_runs_are_refused(runs: list[tuple[int, int, int]], problem: str) -> None:
    with pytest.raises(ProtocolError, match=problem):
        from_wire(np.asarray(runs, dtype="<i4").tobytes(), NUM_BLOCKS, 10)


def test_a_torn_run_is_refused() -> None:
    with pytest.raises(ProtocolError, match="multiple of 12"):
        from_wire(bytes(13), NUM_BLOCKS, 10)
