"""Copying runs of blocks: compiled and not, past the caches and not, against numpy."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtransfer import gather
from kvtransfer.extents import NO_RUNS, Runs, coalesce, expand, num_blocks
from kvtransfer.gather import Gather

BLOCK_SIZES = (1, 60, 4096, 16 * 1024 + 4, 100_000)
NUM_BLOCKS = 24


@st.composite
def permuted_runs(draw: st.DrawFn) -> Runs:
    source = draw(st.lists(st.integers(0, NUM_BLOCKS - 1), max_size=NUM_BLOCKS))
    target = draw(st.permutations(range(NUM_BLOCKS)))
    if draw(st.booleans()):
        source, target = sorted(source), sorted(target)
    pairs = np.array(list(zip(source, target, strict=False)), dtype=np.int64).reshape(-1, 2)
    return coalesce(pairs)


@pytest.fixture(params=["compiled", "compiled, past the caches", "run by run"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How blocks are copied, whatever their size."""
    if request.param == "run by run":
        monkeypatch.setattr(gather, "compiled", lambda: None)
    else:
        assert gather.compiled() is not None
        monkeypatch.setattr(gather, "GIL_FREE_BYTES", 0)
        past_caches = "past" in request.param
        monkeypatch.setattr(gather, "PAST_CACHES_BYTES", 0 if past_caches else 2**62)
    return str(request.param)


@pytest.mark.parametrize("block_bytes", BLOCK_SIZES)
def test_every_byte_of_a_range_is_copied_and_no_other(way: str, block_bytes: int) -> None:
    rng = np.random.default_rng(0)
    source = rng.integers(0, 256, NUM_BLOCKS * block_bytes + 1, dtype=np.uint8)[1:]

    @settings(deadline=None, max_examples=20)
    @given(permuted_runs(), st.floats(0, 1), st.floats(0, 1))
    def check(runs: Runs, first: float, last: float) -> None:
        total = num_blocks(runs) * block_bytes
        begin, end = sorted((int(first * total), int(last * total)))
        target = np.zeros(NUM_BLOCKS * block_bytes, dtype=np.uint8)
        expected = target.copy().reshape(NUM_BLOCKS, block_bytes)
        copied = source.reshape(NUM_BLOCKS, block_bytes)[expand(runs[:, 0], runs[:, 2])].ravel()
        copied[:begin] = 0
        copied[end:] = 0
        expected[expand(runs[:, 1], runs[:, 2])] = copied.reshape(-1, block_bytes)
        Gather(memoryview(source), memoryview(target), block_bytes).copy(runs, begin, end)
        assert (target == expected.ravel()).all()

    check()


def test_nothing_to_copy(way: str) -> None:
    target = np.zeros(8, dtype=np.uint8)
    Gather(memoryview(np.ones(8, dtype=np.uint8)), memoryview(target), 4).copy(NO_RUNS, 0, 0)
    assert not target.any()
