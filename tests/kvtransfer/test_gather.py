"""Copies of blocks by each code path (compiled, plain, past the caches) equal numpy's."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtransfer.blocks.extents import NO_BLOCKS, Blocks
from kvtransfer.transports import shm
from kvtransfer.transports.shm import Gather

BLOCK_SIZES = (1, 60, 4096, 16 * 1024 + 4, 100_000)
NUM_BLOCKS = 24


@st.composite
def permuted_blocks(draw: st.DrawFn) -> Blocks:
    source = draw(st.lists(st.integers(0, NUM_BLOCKS - 1), max_size=NUM_BLOCKS))
    target = draw(st.permutations(range(NUM_BLOCKS)))
    if draw(st.booleans()):
        source, target = sorted(source), sorted(target)
    return np.array(list(zip(source, target, strict=False)), dtype=np.int64).reshape(-1, 2).T


@pytest.fixture(params=["compiled", "compiled, past the caches", "block by block"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Select the code path, whatever the blocks' size."""
    if request.param == "block by block":
        monkeypatch.setattr(shm, "compiled", lambda: None)
    else:
        assert shm.compiled() is not None
        monkeypatch.setattr(shm, "GIL_FREE_BYTES", 0)
        past_caches = "past" in request.param
        monkeypatch.setattr(shm, "PAST_CACHES_BYTES", 0 if past_caches else 2**62)
    return str(request.param)


@pytest.mark.parametrize("block_bytes", BLOCK_SIZES)
def test_exactly_the_range_is_copied(way: str, block_bytes: int) -> None:
    rng = np.random.default_rng(0)
    source = rng.integers(0, 256, NUM_BLOCKS * block_bytes + 1, dtype=np.uint8)[1:]

    @settings(deadline=None, max_examples=20)
    @given(permuted_blocks(), st.floats(0, 1), st.floats(0, 1))
    def check(blocks: Blocks, first: float, last: float) -> None:
        sources, targets = blocks
        total = len(sources) * block_bytes
        begin, end = sorted((int(first * total), int(last * total)))
        target = np.zeros(NUM_BLOCKS * block_bytes, dtype=np.uint8)
        expected = target.copy().reshape(NUM_BLOCKS, block_bytes)
        copied = source.reshape(NUM_BLOCKS, block_bytes)[sources].ravel()
        copied[:begin] = 0
        copied[end:] = 0
        expected[targets] = copied.reshape(-1, block_bytes)
        Gather(memoryview(source), memoryview(target), block_bytes).copy(sources, targets, begin, end)
        assert (target == expected.ravel()).all()

    check()


def test_nothing_to_copy(way: str) -> None:
    target = np.zeros(8, dtype=np.uint8)
    Gather(memoryview(np.ones(8, dtype=np.uint8)), memoryview(target), 4).copy(*NO_BLOCKS, 0, 0)
    assert not target.any()
