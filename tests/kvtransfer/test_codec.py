"""The lossless code of bf16 KV: every pattern, size and place comes back, and damaged bytes harm nothing."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtransfer.blocks.codec import SLICE_BYTES, Codec, slices

Raw = npt.NDArray[np.uint8]
GUARD = 64


def bf16(values: npt.NDArray[np.float32]) -> Raw:
    return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)


def normal(count: int, spread: float = 1.0) -> Raw:
    """Return values whose channels differ in size by powers of `spread`, as those of keys do."""
    rng = np.random.default_rng(count)
    return bf16((rng.standard_normal(count) * spread ** (np.arange(count) % 4)).astype(np.float32))


CASES = {
    "all patterns in order": np.arange(2**16, dtype=np.uint16).view(np.uint8),
    "all patterns, mixed": np.random.default_rng(0).permutation(2**16).astype(np.uint16).view(np.uint8),
    "random bytes": np.random.default_rng(1).integers(0, 256, 20_001, np.uint8),
    "values": normal(5000),
    "channels of different size": normal(5000, 8.0),
    "zeros": np.zeros(4096, np.uint8),
    "zeros after values": np.concatenate([normal(1000), np.zeros(3000, np.uint8)]),
    "each exponent": np.repeat(np.arange(256, dtype=np.uint16) << 7, 256).view(np.uint8),
}


def encoded(source: Raw, block_bytes: int, blocks: npt.NDArray[np.int64], first: int, last: int) -> Raw:
    codec = Codec(block_bytes)
    coded = codec.encode(memoryview(source), blocks, first, last)
    return np.frombuffer(coded, np.uint8).copy()


def decoded(
    coded: Raw, block_bytes: int, blocks: npt.NDArray[np.int64], first: int, last: int, room: int
) -> tuple[bool, Raw]:
    """Decode into `room` bytes, and check that nothing around them is touched."""
    codec = Codec(block_bytes)
    codec.staging[: len(coded)] = memoryview(coded)
    target = np.full(room + 2 * GUARD, 0xA5, np.uint8)
    inside = memoryview(target)[GUARD : GUARD + room]
    good = codec.decode(len(coded), inside, blocks, first, last)
    assert (target[:GUARD] == 0xA5).all() and (target[GUARD + room :] == 0xA5).all()
    return good, target[GUARD : GUARD + room]


@pytest.mark.parametrize("case", CASES)
def test_every_value_comes_back(case: str) -> None:
    source = CASES[case]
    only = np.zeros(1, np.int64)
    coded = encoded(source, len(source), only, 0, len(source))
    good, back = decoded(coded, len(source), only, 0, len(source), len(source))
    assert good and np.array_equal(back, source)
    assert len(coded) <= len(source)
    if case in ("values", "zeros"):
        assert len(coded) < 0.72 * len(source)


@settings(deadline=None, max_examples=60)
@given(
    st.sampled_from([1, 2, 511, 512, 514, 1536, 4000]),
    st.permutations(range(6)),
    st.integers(0, 3),
    st.floats(0, 1),
    st.floats(0, 1),
)
def test_exactly_the_range_comes_back(
    block_bytes: int, order: list[int], offset: int, first: float, last: float
) -> None:
    """Blocks of any size lie anywhere, in any order; only the range of bytes is read and written."""
    source = normal(6 * 4000)[offset : offset + 6 * block_bytes]
    total = 4 * block_bytes
    begin, end = sorted((int(first * total), int(last * total)))
    sources, targets = np.array(order[:4], np.int64), np.array(order[::-1][:4], np.int64)
    coded = encoded(source, block_bytes, sources, begin, end)
    good, back = decoded(coded, block_bytes, targets, begin, end, 6 * block_bytes)
    expected = np.full((6, block_bytes), 0xA5, np.uint8)
    expected[targets] = source.reshape(6, block_bytes)[sources]
    flat = expected[targets].ravel()
    flat[:begin] = flat[end:] = 0xA5
    expected[targets] = flat.reshape(4, block_bytes)
    assert good and np.array_equal(back, expected.ravel())


@settings(deadline=None, max_examples=60)
@given(
    st.sampled_from(["values", "random bytes", "zeros after values"]),
    st.lists(st.tuples(st.integers(0, 2**16), st.integers(0, 255)), max_size=8),
    st.integers(-600, 600),
)
def test_damaged_bytes_are_told_or_change_only_their_range(
    case: str, changes: list[tuple[int, int]], longer: int
) -> None:
    """Decoding either fails or writes other values; it never leaves its buffers (see `decoded`)."""
    source, only = CASES[case], np.zeros(1, np.int64)
    coded = encoded(source, len(source), only, 0, len(source))
    for place, value in changes:
        coded[place % len(coded)] = value
    size = int(np.clip(len(coded) + longer, 0, len(source)))
    good, _ = decoded(np.resize(coded, size), len(source), only, 0, len(source), len(source))
    if not changes and longer and size not in (len(coded), len(source)):
        assert not good


def test_slices_cover_a_piece_and_fit_the_staging() -> None:
    nbytes = 2 * SLICE_BYTES + 5
    assert list(slices(nbytes)) == [
        (0, SLICE_BYTES),
        (SLICE_BYTES, 2 * SLICE_BYTES),
        (2 * SLICE_BYTES, nbytes),
    ]
    noise = np.random.default_rng(2).integers(0, 256, SLICE_BYTES, np.uint8)
    assert len(encoded(noise, 512, np.arange(SLICE_BYTES // 512), 0, SLICE_BYTES)) == SLICE_BYTES
