"""Checksums of pieces, equal on both sides of a transfer: XXH3 (64 bits) over the blocks in order.

`full` covers every byte. `sampled` covers one sixteenth of every block, a different one for each block,
chosen by (lease, piece, index in the piece), which both sides know. A block that was lost, swapped or
misplaced is detected as with `full`, since some of its bytes are covered whichever sixteenth it is (missed
with a probability of 2**-64). Damage to a part of a block may lie outside its sixteenth: a single flipped
bit is detected with a probability of 1/16, a block of which the share s is stale with about s, and if that
happens to n blocks it is missed with a probability of about (1 - s)**n.
"""

from __future__ import annotations

from hashlib import shake_128
from typing import Literal

import numpy as np
import xxhash

from kvtransfer.blocks.extents import BlockIndices, Views, views

Mode = Literal["off", "sampled", "full"]
SHARES = 16


def piece_checksum(
    mode: Mode, buffer: memoryview, block_bytes: int, blocks: BlockIndices, lease_id: str, index: int
) -> bytes | None:
    """Return the eight-byte checksum of a piece, whose blocks sender and receiver each find in `blocks` of
    their `buffer`.

    None if `off`.
    """
    if mode == "off":
        return None
    parts = views(buffer, block_bytes, blocks)
    if mode == "sampled":
        shares = chosen_shares(lease_id, index, len(blocks))
        starts = blocks * block_bytes + shares * block_bytes // SHARES
        ends = blocks * block_bytes + (shares + 1) * block_bytes // SHARES
        parts = Views(buffer, starts.tolist(), ends.tolist())
    state = xxhash.xxh3_64()
    for part in parts:
        state.update(part)
    return state.digest()


def chosen_shares(lease_id: str, index: int, count: int) -> BlockIndices:
    """Return the covered sixteenth of each of a piece's `count` blocks: int64 [count] in [0, 16)."""
    stream = shake_128(f"{index}/{lease_id}".encode()).digest(count)
    return np.frombuffer(stream, np.uint8).astype(np.int64) % SHARES
