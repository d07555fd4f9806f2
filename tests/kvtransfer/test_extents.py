"""Blocks of a piece: runs on the wire, buffers, and checksums."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtransfer.blocks.extents import (
    RUN_BYTES,
    SHARES,
    Blocks,
    ScatterList,
    chosen_shares,
    cut,
    from_wire,
    piece_checksum,
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


def blocks_of(pairs: list[tuple[int, int]]) -> Blocks:
    return np.asarray(pairs, dtype=np.int64).reshape(-1, 2).T


@given(extents(), st.integers(0, 9), st.integers(1, 30))
def test_parts_have_the_blocks_in_order(pairs: list[tuple[int, int]], first: int, max_blocks: int) -> None:
    sources = [source for source, _ in pairs]
    parts = cut(sources, first, NUM_BLOCKS, max_blocks)
    assert all(1 <= part.shape[1] <= max_blocks for part in parts)
    held = [pair for part in parts for pair in part.T.tolist()]
    assert held == [[source, position] for position, source in enumerate(sources, first)]


@given(extents())
def test_runs_survive_the_wire_in_the_fewest_runs(pairs: list[tuple[int, int]]) -> None:
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


BLOCK_BYTES = 256
CHECKED_BLOCKS = 64


class Pair:
    """A sender's pool and a receiver's, with the same 40 blocks in different places."""

    def __init__(self, seed: int = 0) -> None:
        rng = random.Random(seed)
        # Runs of a few blocks, so that they coalesce differently on the two sides.
        sources = [start + i for start in rng.sample(range(0, CHECKED_BLOCKS, 4), 10) for i in range(4)]
        targets = [start + i for start in rng.sample(range(0, CHECKED_BLOCKS, 8), 5) for i in range(8)]
        self.sent = bytearray(rng.randbytes(CHECKED_BLOCKS * BLOCK_BYTES))
        self.got = bytearray(rng.randbytes(CHECKED_BLOCKS * BLOCK_BYTES))
        self.pairs = list(zip(sources, targets, strict=True))
        for source, target in self.pairs:
            self.put(target, self.sent[source * BLOCK_BYTES : (source + 1) * BLOCK_BYTES])

    def put(self, target: int, block: bytearray) -> None:
        self.got[target * BLOCK_BYTES : (target + 1) * BLOCK_BYTES] = block

    def agree(self, mode: Any, lease_id: str = "lease", sequence: int = 0) -> bool:
        sources, targets = np.array(self.pairs, dtype=np.int64).reshape(-1, 2).T
        theirs = piece_checksum(mode, memoryview(self.sent), BLOCK_BYTES, sources, lease_id, sequence)
        ours = piece_checksum(mode, memoryview(self.got), BLOCK_BYTES, targets, lease_id, sequence)
        assert (ours is None) == (theirs is None) == (mode == "off")
        return ours == theirs


def full(data: bytes, block_bytes: int, blocks: list[int]) -> bytes:
    places = np.array(blocks, dtype=np.int64)
    found = piece_checksum("full", memoryview(data), block_bytes, places, "lease", 0)
    assert found is not None
    return found


def test_the_algorithm_never_changes() -> None:
    assert full(b"", 1, []).hex() == "2d06800538d394c2"
    assert chosen_shares("lease", 7, 12).tolist() == [0, 13, 7, 15, 6, 11, 11, 6, 0, 9, 5, 11]


def test_checksums_depend_on_the_order_of_bytes_but_not_on_cuts() -> None:
    data = random.Random(1).randbytes(5000)
    assert full(data, 5000, [0]) == full(data, 1000, [0, 1, 2, 3, 4])
    assert full(data, 5000, [0]) == full(data[1000:] + data[:1000], 1000, [4, 0, 1, 2, 3])
    assert full(data, 5000, [0]) != full(data, 1000, [1, 0, 2, 3, 4])


@pytest.mark.parametrize("mode", ["sampled", "full"])
def test_any_two_swapped_blocks_are_detected(mode: str) -> None:
    for index in range(39):
        pair = Pair(index)
        (source, target), (other_source, other_target) = pair.pairs[index : index + 2]
        pair.put(target, pair.sent[other_source * BLOCK_BYTES : (other_source + 1) * BLOCK_BYTES])
        pair.put(other_target, pair.sent[source * BLOCK_BYTES : (source + 1) * BLOCK_BYTES])
        assert not pair.agree(mode, "lease", index)


def test_full_detects_every_flipped_bit_and_sampled_one_in_sixteen() -> None:
    pair, rng, seen = Pair(), random.Random(2), 0
    tries = 1600
    for sequence in range(tries):
        at = pair.pairs[rng.randrange(40)][1] * BLOCK_BYTES + rng.randrange(BLOCK_BYTES)
        pair.got[at] ^= 1 << rng.randrange(8)
        assert not pair.agree("full")
        seen += not pair.agree("sampled", "lease", sequence)
        pair = Pair()
    assert 60 < seen < 150  # 100 expected, standard deviation 9.7


def test_the_sample_depends_on_lease_piece_and_place_and_is_uniform() -> None:
    choice = chosen_shares("a", 0, 16000)
    assert (choice == chosen_shares("a", 0, 17000)[:16000]).all()
    assert (choice != chosen_shares("a", 1, 16000)).mean() > 0.9
    assert (choice != chosen_shares("b", 0, 16000)).mean() > 0.9
    counts = np.bincount(choice.astype(np.int64), minlength=SHARES)
    assert len(counts) == SHARES and counts.min() > 850 and counts.max() < 1150


@pytest.mark.parametrize("block_bytes", [16, 17, 100, 8256])
def test_the_sixteen_shares_cover_the_block_without_overlap(block_bytes: int) -> None:
    """The detected flips show that each byte belongs to exactly one share."""
    block = np.zeros(1, dtype=np.int64)
    by_share = {int(chosen_shares("lease", sequence, 1)[0]): sequence for sequence in range(300)}
    assert len(by_share) == SHARES
    clean = memoryview(bytearray(block_bytes))
    sums = {s: piece_checksum("sampled", clean, block_bytes, block, "lease", s) for s in by_share.values()}
    for at in range(0, block_bytes, max(1, block_bytes // 100)):
        dirty = bytearray(block_bytes)
        dirty[at] = 1
        differing = [
            s
            for s, expected in sums.items()
            if piece_checksum("sampled", memoryview(dirty), block_bytes, block, "lease", s) != expected
        ]
        assert len(differing) == 1
