"""Checksums of pieces, equal on both sides of a transfer: XXH3 (64 bits) over the blocks in order.

`full` covers every byte. `sampled` covers one sixteenth of every block, another one for each block, chosen by
(lease, piece, place in the piece), which both sides know. So a block that was lost, swapped or put in a wrong
place is seen like with `full`, since some of its bytes are looked at whichever sixteenth it is (missed with a
chance of 2**-64). What hits only a part of a block may lie outside its sixteenth: a single flipped bit is
seen with a chance of 1/16, a block of which the share s is stale with about s, and if that happens to n
blocks it is missed with a chance of about (1 - s)**n.
"""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b
from typing import Literal

import numpy as np
import xxhash

from kvtransfer.blocks.extents import BlockIndices, views

Mode = Literal["off", "sampled", "full"]
SHARES = 16


def checksum(buffers: Iterable[memoryview]) -> bytes:
    """Eight bytes of the buffers' bytes one after the other, however they are cut."""
    state = xxhash.xxh3_64()
    for buffer in buffers:
        state.update(buffer)
    return state.digest()


def piece_checksum(
    mode: Mode, buffer: memoryview, block_bytes: int, blocks: BlockIndices, lease_id: str, index: int
) -> bytes | None:
    """Of a piece, which sender and receiver each find in `blocks` of their `buffer`; None if `off`."""
    if mode == "off":
        return None
    if mode == "full":
        return checksum(views(buffer, block_bytes, blocks))
    shares = chosen_shares(lease_id, index, len(blocks))
    starts = blocks * block_bytes + shares * block_bytes // SHARES
    ends = blocks * block_bytes + (shares + 1) * block_bytes // SHARES
    return checksum(buffer[start:end] for start, end in zip(starts.tolist(), ends.tolist(), strict=True))


def chosen_shares(lease_id: str, index: int, count: int) -> BlockIndices:
    """Which sixteenth of each of a piece's `count` blocks is looked at: int64 [count] in [0, 16)."""
    key = blake2b(f"{index}/{lease_id}".encode(), digest_size=8).digest()
    mixed = _mix(np.arange(count, dtype=np.uint64) + np.frombuffer(key, "<u8"))
    return (mixed % np.uint64(SHARES)).astype(np.int64)


def _mix(x: np.ndarray) -> np.ndarray:
    """The finalizer of splitmix64 (Steele et al. 2014)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
