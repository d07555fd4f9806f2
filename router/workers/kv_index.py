"""An index of the KV blocks that workers hold in their pools, as their KV events report, in little memory.

A block has one entry, however many workers hold it. The key has 60 bits, so two of a million times a million
blocks might be confused. The value is the set of holders as an integer, with a bit per worker. Equal sets
share one object. Many small dictionaries share the entries, since a large one blocks for a third of a second
when it grows.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Hashable, Iterator, Sequence
from itertools import compress
from typing import Generic, NamedTuple, TypeVar

from protocol.ids import BlockIdentity, block_identities
from protocol.kv_events import IDENTITY_BYTES, CacheFormat, Window

KEY_BITS = (1 << 60) - 1
"""Mask of a key: integers up to this take 32 bytes, larger ones 48."""
NUM_SHARDS = 4096
MAX_SHARED_SETS = 2**16
"""Most distinct sets to share; beyond them, equal sets may be stored twice."""

_IS_SET = bytes(digit == ord("1") for digit in range(256))
"""Table for `bytes.translate`: whether a binary digit, which is one slot, is 1."""

Name = TypeVar("Name", bound=Hashable)


def block_keys(identities: bytes) -> list[int]:
    """Return the index keys of consecutive block identities."""
    words = struct.unpack(f"<{len(identities) // IDENTITY_BYTES * 2}Q", identities)
    return [word & KEY_BITS for word in words[::2]]


class HashedBlocks(NamedTuple):
    """The keys of the leading full blocks of a token sequence, and the identity of the last one."""

    keys: list[int]
    last: BlockIdentity


def hash_blocks(parent: BlockIdentity, token_ids: Sequence[int], block_size: int) -> HashedBlocks:
    """Hash the full blocks after `parent` in the way of the workers."""
    identities = list(block_identities(parent, token_ids, block_size))
    return HashedBlocks(block_keys(b"".join(identities)), identities[-1] if identities else parent)


class KvIndex(Generic[Name]):
    """A map of blocks to their holders, for one thread. A holder has a slot (a small number) and a `Name`."""

    def __init__(self) -> None:
        self._shards: list[dict[int, int]] = [{} for _ in range(NUM_SHARDS)]
        self._names: list[Name] = []
        self._free: list[int] = []
        self._live = 0
        """Bit of each slot in use."""
        self._shared: dict[int, int] = {}
        self._dead = 0
        """Bits of the removed slots that are not swept yet."""
        self._sweeping = 0
        """Bits of `_dead` that the current round over the shards removes."""
        self._next_shard = 0

    def __len__(self) -> int:
        """Return the number of blocks, including those of removed holders that are not swept yet."""
        return sum(map(len, self._shards))

    def add_holder(self, name: Name) -> int:
        """Return a slot for a holder that has no blocks yet."""
        if self._free:
            slot = self._free.pop()
        else:
            slot = len(self._names)
            self._names.append(name)
        self._names[slot] = name
        self._live |= 1 << slot
        return slot

    def remove_holder(self, slot: int) -> None:
        """Remove a holder. Its blocks are no longer found; `sweep` frees their memory."""
        self._live ^= 1 << slot
        self._dead |= 1 << slot

    def store(self, slot: int, keys: Sequence[int]) -> None:
        shards, bit = self._shards, self._share(1 << slot)
        for key in keys:
            shard = shards[key % NUM_SHARDS]
            holders = shard.get(key)
            if holders is None:
                shard[key] = bit
            elif not holders & bit:
                shard[key] = self._share(holders | bit)

    def evict(self, slot: int, keys: Sequence[int]) -> None:
        """Remove blocks of a holder. Blocks that the holder is not known to have are ignored."""
        shards, bit = self._shards, 1 << slot
        for key in keys:
            shard = shards[key % NUM_SHARDS]
            holders = shard.get(key, 0)
            if holders == bit:
                del shard[key]
            elif holders & bit:
                shard[key] = self._share(holders ^ bit)

    def cached_tokens(self, keys: Sequence[int], num_tokens: int, cache: CacheFormat) -> dict[Name, int]:
        """Return how many leading tokens of a prompt of `num_tokens` tokens each holder has in its pool."""
        if cache.has_states:  # the last token needs a state before it
            leading = self.find_ends(keys[: (num_tokens - 1) // cache.block_size])
        elif cache.window:
            leading = self.find_windows(keys, Window(cache.window, cache.block_size))
        else:
            leading = self.find(keys)
        return {name: num_blocks * cache.block_size for name, num_blocks in leading.items()}

    def find(self, keys: Sequence[int]) -> dict[Name, int]:
        """Return how many leading blocks of a prompt each holder has.

        By binary search: a holder of one block is assumed to hold all blocks before it, since a pool evicts
        the end of a prefix first. Few look-ups matter, because each one misses the CPU's caches.
        """
        found: dict[Name, int] = {}
        if not keys:
            return found
        spans = [(0, self._holders(keys[0]), len(keys), 0)]
        while spans:
            start, holders, end, left = spans.pop()
            if holders == left:
                continue
            if end - start == 1:
                self._note(found, holders ^ left, end)
                continue
            middle = (start + end) // 2
            halfway = self._holders(keys[middle]) & holders
            spans.append((start, holders, middle, halfway))
            spans.append((middle, halfway, end, left & halfway))
        return found

    def find_ends(self, keys: Sequence[int]) -> dict[Name, int]:
        """Return how many leading blocks each holder has if it reports only the last block of each prefix."""
        found: dict[Name, int] = {}
        seen = 0
        for end in range(len(keys), 0, -1):
            holders = self._holders(keys[end - 1]) & ~seen
            if holders:
                self._note(found, holders, end)
                seen |= holders
        return found

    def find_windows(self, keys: Sequence[int], window: Window) -> dict[Name, int]:
        """Return how many leading blocks each holder has if the next token reads only a window of them."""
        found: dict[Name, int] = {}
        ends: dict[int, int] = {}
        """End of the current run of consecutive blocks, by the bit of its holder."""
        seen = 0
        for place in range(len(keys) - 1, -1, -1):
            holders = self._holders(keys[place]) & ~seen
            for holder in [holder for holder in ends if not holder & holders]:
                del ends[holder]
            for holder in _lowest_bits(holders):
                end = ends.setdefault(holder, place + 1)
                if place <= window.first_place(end * window.block_size):
                    self._note(found, holder, end)
                    seen |= holder
                    del ends[holder]
        return found

    def _holders(self, key: int) -> int:
        """Return the bits of the slots in use that have the block."""
        return self._shards[key % NUM_SHARDS].get(key, 0) & self._live

    def _note(self, found: dict[Name, int], holders: int, num_blocks: int) -> None:
        """Set `num_blocks` for the holders, given by their bits."""
        found.update(dict.fromkeys(compress(self._names, _flags(holders)), num_blocks))

    def _share(self, holders: int) -> int:
        if len(self._shared) > MAX_SHARED_SETS:
            self._shared.clear()
        return self._shared.setdefault(holders, holders)

    def sweep(self, seconds: float) -> bool:
        """Remove blocks of removed holders for about `seconds`. Return whether any may remain.

        A complete round frees their slots.
        """
        deadline = time.perf_counter() + seconds
        while self._dead and time.perf_counter() < deadline:
            if self._next_shard == 0:
                self._sweeping = self._dead
            self._sweep_shard(self._shards[self._next_shard])
            self._next_shard = (self._next_shard + 1) % NUM_SHARDS
            if self._next_shard == 0:
                self._end_round()
        return bool(self._dead)

    def _sweep_shard(self, shard: dict[int, int]) -> None:
        dead = self._sweeping
        for key, holders in [(key, holders) for key, holders in shard.items() if holders & dead]:
            left = holders & ~dead
            if left:
                shard[key] = self._share(left)
            else:
                del shard[key]

    def _end_round(self) -> None:
        swept, self._sweeping = self._sweeping, 0
        self._dead ^= swept
        self._shared.clear()
        self._free.extend(compress(range(len(self._names)), _flags(swept)))


def _lowest_bits(holders: int) -> Iterator[int]:
    while holders:
        lowest = holders & -holders
        yield lowest
        holders ^= lowest


def _flags(bits: int) -> bytes:
    """Return a byte per slot: whether its bit is set."""
    return f"{bits:b}"[::-1].encode().translate(_IS_SET)
