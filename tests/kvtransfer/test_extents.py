"""Cutting blocks into parts, and the runs and buffers made of them, against the plain list of pairs."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtransfer.blocks.extents import RUN_BYTES, Blocks, ScatterList, cut, from_wire, to_wire, views
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


def blocks_of(pairs: list[tuple[int, int]]) -> Blocks:
    return np.asarray(pairs, dtype=np.int64).reshape(-1, 2).T


@given(extents(), st.integers(0, 9), st.integers(1, 30))
def test_parts_hold_the_blocks_in_order(pairs: list[tuple[int, int]], first: int, max_blocks: int) -> None:
    sources = [source for source, _ in pairs]
    parts = cut(sources, first, NUM_BLOCKS, max_blocks)
    assert all(1 <= part.shape[1] <= max_blocks for part in parts)
    held = [pair for part in parts for pair in part.T.tolist()]
    assert held == [[source, position] for position, source in enumerate(sources, first)]


@given(extents())
def test_what_goes_over_the_wire_comes_back_in_as_few_runs_as_can_be(pairs: list[tuple[int, int]]) -> None:
    raw = to_wire(blocks_of(pairs))
    assert from_wire(raw, NUM_BLOCKS, len(pairs)).T.tolist() == [list(pair) for pair in pairs]
    follow = [(source + 1, target + 1) == after for (source, target), after in pairwise(pairs)]
    assert len(raw) == RUN_BYTES * (len(pairs) - sum(follow))


@given(extents(), st.integers(1, 7), st.randoms())
def test_a_scatter_list_moves_every_byte_once(pairs: list[tuple[int, int]], block_bytes: int, rng) -> None:
    source = memoryview(bytes(rng.randbytes(NUM_BLOCKS * block_bytes)))
    expected = b"".join(source[s * block_bytes : (s + 1) * block_bytes] for s, _ in pairs)
    blocks = views(source, block_bytes, blocks_of(pairs)[0])
    assert len(blocks) == len(pairs) - sum(second - first == 1 for (first, _), (second, _) in pairwise(pairs))
    rest = ScatterList([blocks])
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
