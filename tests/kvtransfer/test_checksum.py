"""Checksums of pieces: equal on both sides, different for whatever they promise to see."""

from __future__ import annotations

import random

import numpy as np
import pytest

from kvtransfer.blocks.checksum import SHARES, chosen_shares, piece_checksum

BLOCK_BYTES = 256
NUM_BLOCKS = 64


class Pair:
    """A sender's pool and a receiver's with the same 40 blocks in other places."""

    def __init__(self, seed: int = 0) -> None:
        rng = random.Random(seed)
        # Runs of a few blocks, so that they coalesce differently on the two sides.
        sources = [start + i for start in rng.sample(range(0, NUM_BLOCKS, 4), 10) for i in range(4)]
        targets = [start + i for start in rng.sample(range(0, NUM_BLOCKS, 8), 5) for i in range(8)]
        self.sent = bytearray(rng.randbytes(NUM_BLOCKS * BLOCK_BYTES))
        self.got = bytearray(rng.randbytes(NUM_BLOCKS * BLOCK_BYTES))
        self.pairs = list(zip(sources, targets, strict=True))
        for source, target in self.pairs:
            self.put(target, self.sent[source * BLOCK_BYTES : (source + 1) * BLOCK_BYTES])

    def put(self, target: int, block: bytes) -> None:
        self.got[target * BLOCK_BYTES : (target + 1) * BLOCK_BYTES] = block

    def agree(self, mode: str, lease_id: str = "lease", sequence: int = 0) -> bool:
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


def test_the_algorithm_stays_what_peers_expect() -> None:
    assert full(b"", 1, []).hex() == "2d06800538d394c2"
    assert chosen_shares("lease", 7, 12).tolist() == [0, 13, 7, 15, 6, 11, 11, 6, 0, 9, 5, 11]


def test_how_the_bytes_are_cut_does_not_matter_but_their_order_does() -> None:
    data = random.Random(1).randbytes(5000)
    assert full(data, 5000, [0]) == full(data, 1000, [0, 1, 2, 3, 4])
    assert full(data, 5000, [0]) == full(data[1000:] + data[:1000], 1000, [4, 0, 1, 2, 3])
    assert full(data, 5000, [0]) != full(data, 1000, [1, 0, 2, 3, 4])


@pytest.mark.parametrize("mode", ["off", "sampled", "full"])
def test_both_sides_agree_wherever_their_blocks_lie(mode: str) -> None:
    for seed in range(10):
        assert Pair(seed).agree(mode, f"lease-{seed}", seed)


@pytest.mark.parametrize("mode", ["sampled", "full"])
def test_any_wrong_block_is_seen(mode: str) -> None:
    for index in range(40):
        pair = Pair(index)
        pair.put(pair.pairs[index][1], random.Random(index).randbytes(BLOCK_BYTES))
        assert not pair.agree(mode, "lease", index)


@pytest.mark.parametrize("mode", ["sampled", "full"])
def test_any_two_swapped_blocks_are_seen(mode: str) -> None:
    for index in range(39):
        pair = Pair(index)
        (source, target), (other_source, other_target) = pair.pairs[index : index + 2]
        pair.put(target, pair.sent[other_source * BLOCK_BYTES : (other_source + 1) * BLOCK_BYTES])
        pair.put(other_target, pair.sent[source * BLOCK_BYTES : (source + 1) * BLOCK_BYTES])
        assert not pair.agree(mode, "lease", index)


def test_full_sees_every_flipped_bit_and_sampled_one_in_sixteen() -> None:
    pair, rng, seen = Pair(), random.Random(2), 0
    tries = 1600
    for sequence in range(tries):
        at = pair.pairs[rng.randrange(40)][1] * BLOCK_BYTES + rng.randrange(BLOCK_BYTES)
        pair.got[at] ^= 1 << rng.randrange(8)
        assert not pair.agree("full")
        seen += not pair.agree("sampled", "lease", sequence)
        pair = Pair()
    assert 60 < seen < 150  # 100 expected, standard deviation 9.7


def test_the_choice_depends_on_lease_piece_and_place_and_is_even() -> None:
    choice = chosen_shares("a", 0, 16000)
    assert (choice == chosen_shares("a", 0, 17000)[:16000]).all()
    assert (choice != chosen_shares("a", 1, 16000)).mean() > 0.9
    assert (choice != chosen_shares("b", 0, 16000)).mean() > 0.9
    counts = np.bincount(choice.astype(np.int64), minlength=SHARES)
    assert len(counts) == SHARES and counts.min() > 850 and counts.max() < 1150


@pytest.mark.parametrize("block_bytes", [16, 17, 100, 8256])
def test_the_sixteen_shares_cover_the_block_without_overlap(block_bytes: int) -> None:
    """By what is seen: each byte of a block belongs to the share of exactly one choice."""
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
