"""The host tier: blocks that the device pool evicted, in host memory, found again by their identity.

A block is copied when the pool evicts it, not when it is published. So nothing is copied while the pool has
room, and a block that was loaded from the host and is evicted again needs no second copy.

With a disk tier each block is also written to the disk, in the background and oldest first. Writing blocks
when the host tier evicts them would take as many writes. But this way most blocks are on the disk before a
burst of evictions, and all blocks are there after a restart.
"""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from engine.copies import host_zeros
from engine.kv.cache_events import CacheLog
from engine.kv.tiers.disk import DiskTier
from protocol.ids import BlockIdentity
from protocol.kv_events import Medium

FETCH_TIMEOUT_S = 2.0
"""Seconds that a sequence waits for blocks from the disk before it computes them instead."""

MIN_SLOTS_WITH_DISK = 4
"""Least slots with a disk. The disk reads into at most half of the slots and writes at most a quarter, so it
never uses all."""


_CHUNK_BYTES = 256 << 20
"""Bytes of pinned memory allocated at once. Torch rounds each allocation up to a power of two, so a single
one could take twice the memory."""


class HostMemory:
    """`num_slots` slots, each as large as one block of `pool`, a tensor [num_blocks, ...] on any device.

    On a CPU a copy is done when the call returns. On CUDA a copy from or to pinned memory is queued in the
    current stream. So it runs after the forward that wrote the block and before the forward that reads or
    overwrites it, and this thread does not wait.
    """

    def __init__(self, pool: Tensor, num_slots: int) -> None:
        self.num_slots = num_slots
        self._blocks = pool.view(pool.shape[0], -1).view(torch.uint8)
        self.block_bytes = self._blocks.shape[1]
        self._on_cuda = pool.is_cuda
        self._chunks = _allocate(num_slots, self.block_bytes, pool.is_cuda)
        self._queued: dict[int, torch.cuda.Event] = {}

    def save(self, block: int, slot: int) -> None:
        self._copy(self._slot(slot), self._blocks[block], slot)

    def load(self, slot: int, block: int) -> None:
        self._copy(self._blocks[block], self._slot(slot), slot)

    def buffer(self, slot: int) -> memoryview:
        """Return the slot's bytes, once the copies queued for it are done. Any thread may call this."""
        event = self._queued.pop(slot, None)
        if event is not None:
            event.synchronize()
        return memoryview(self._slot(slot).numpy())

    def finish(self) -> None:
        """Wait for all copies. Needed before anything except this thread's forwards uses the device pool."""
        if self._on_cuda:
            torch.cuda.current_stream(self._blocks.device).synchronize()

    def _slot(self, slot: int) -> Tensor:
        chunk, place = divmod(slot, len(self._chunks[0]))
        return self._chunks[chunk][place]

    def _copy(self, target: Tensor, source: Tensor, slot: int) -> None:
        if not self._on_cuda:
            # One thread is about as fast as torch's several threads, which wait for each other on busy cores.
            np.copyto(target.numpy(), source.numpy())
        else:
            target.copy_(source, non_blocking=True)
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(self._blocks.device))
            self._queued[slot] = event


def _allocate(num_slots: int, block_bytes: int, pinned: bool) -> list[Tensor]:
    """Allocate the slots in chunks uint8 [slots, block_bytes], equally large except the last one."""
    if not pinned:
        return [host_zeros(num_slots * block_bytes).view(num_slots, block_bytes)]
    most = max(1, _CHUNK_BYTES // block_bytes)
    sizes = [min(most, num_slots - first) for first in range(0, num_slots, most)]
    return [torch.empty((slots, block_bytes), dtype=torch.uint8, pin_memory=True) for slots in sizes]


class Evicted(NamedTuple):
    """A published block of the device pool that is about to be overwritten."""

    identity: BlockIdentity
    block: int


@dataclass(eq=False)
class DiskFetch:
    """A read of blocks from the disk, for a waiting sequence. Times are `time.monotonic()`."""

    deadline: float
    remaining: int = 0
    expired: bool = False


@dataclass
class HostCounters:
    hit_blocks: float = 0
    miss_blocks: float = 0
    saved_blocks: float = 0
    saved_bytes: float = 0
    save_seconds: float = 0
    loaded_bytes: float = 0
    load_seconds: float = 0
    evicted_blocks: float = 0


class HostTier:
    """The tier below a device pool. Only the engine's thread may call methods, except the counters. Copies
    run in order with all other uses of the device pool.

    Each slot of `memory` is free, in the index, or lent to the disk tier, which fills it. A block that is
    being written to the disk stays in the index and in its slot until the write is done.
    """

    def __init__(self, memory: HostMemory, disk: DiskTier | None = None) -> None:
        self.capacity = memory.num_slots
        self.counters = HostCounters()
        self._memory = memory
        self._disk = disk
        self._log: CacheLog | None = None
        self._slot_of: OrderedDict[BlockIdentity, int] = OrderedDict()
        self._free = list(range(memory.num_slots - 1, -1, -1))
        self._wanted: deque[BlockIdentity] = deque()
        self._fetches: dict[BlockIdentity, list[DiskFetch]] = {}
        """The fetches that wait for each block; the block is being read or will be."""
        self._unwritten: OrderedDict[BlockIdentity, None] = OrderedDict()
        """Blocks in the index that are neither on the disk nor queued to be written; oldest first."""
        self._num_reading = 0
        self._max_reading = self.capacity // 2
        self._max_writing = self.capacity // 4

    # --- the block manager's side -------------------------------------------------------------------

    def watch(self, log: CacheLog) -> None:
        """Log the blocks that are stored and removed, here and on the disk."""
        self._log = log
        if self._disk is not None:
            self._disk.log = log

    def contents(self) -> Iterator[tuple[Medium, BlockIdentity]]:
        """Yield all blocks, here and on the disk."""
        for identity in self._slot_of:
            yield Medium.CPU, identity
        for identity in self._disk.stored() if self._disk is not None else ():
            yield Medium.STORAGE, identity

    def holds(self, identity: BlockIdentity) -> bool:
        """Return whether `load` would find the block now."""
        return identity in self._slot_of

    def knows(self, identity: BlockIdentity) -> bool:
        """Return whether the block is here or on the disk."""
        return identity in self._slot_of or (self._disk is not None and self._disk.holds(identity))

    def touch(self, identities: Sequence[BlockIdentity]) -> None:
        """Mark blocks that will soon be loaded as recently used; evict the first one last."""
        for identity in reversed(identities):
            if identity in self._slot_of:
                self._slot_of.move_to_end(identity)

    def save(self, evicted: Sequence[Evicted]) -> None:
        """Copy these device blocks, which the caller then overwrites."""
        started = time.perf_counter()
        self._collect()
        for identity, block in evicted:
            if identity in self._slot_of:
                self._slot_of.move_to_end(identity)
                continue
            slot = self._take_slot(may_drop=True)
            assert slot is not None
            self._memory.save(block, slot)
            self._keep(identity, slot)
            if self._disk is not None and not self._disk.holds(identity):
                self._unwritten[identity] = None
            self.counters.saved_blocks += 1
            self.counters.saved_bytes += self._memory.block_bytes
        self._begin_writes(self._max_writing)
        self.counters.save_seconds += time.perf_counter() - started

    def load(self, identities: Sequence[BlockIdentity], block_ids: Sequence[int]) -> int:
        """Copy blocks to the device, up to the first that is no longer here; return the number copied."""
        started = time.perf_counter()
        num_loaded = 0
        for identity, block in zip(identities, block_ids, strict=True):
            slot = self._slot_of.get(identity)
            if slot is None:
                break
            self._memory.load(slot, block)
            num_loaded += 1
        self.counters.hit_blocks += num_loaded
        self.counters.loaded_bytes += num_loaded * self._memory.block_bytes
        self.counters.load_seconds += time.perf_counter() - started
        return num_loaded

    def count_misses(self, num_blocks: int) -> None:
        """Count full blocks of an admitted prompt that no tier had."""
        self.counters.miss_blocks += num_blocks

    def finish(self) -> None:
        """Wait for copies that are queued on the device."""
        self._memory.finish()

    # --- the scheduler's side -----------------------------------------------------------------------

    def fetch(self, identities: Iterable[BlockIdentity], num_unknown: int = 0) -> DiskFetch:
        """Begin to read the blocks that are on the disk, so that `load` finds them. All `identities` are
        known: a prompt's next blocks. The prompt's `num_unknown` other blocks count as misses.

        Read at most half the capacity of the host tier, since blocks that are evicted may be needed, too.
        """
        fetch = DiskFetch(time.monotonic() + FETCH_TIMEOUT_S)
        if self._disk is None:
            return fetch
        self._disk.counters.miss_blocks += num_unknown
        present = []
        for identity in identities:
            if identity in self._slot_of:
                present.append(identity)
                continue
            if identity not in self._fetches:
                if fetch.remaining == self._max_reading:
                    break
                self._disk.touch(identity)
                self._fetches[identity] = []
                self._wanted.append(identity)
            self._fetches[identity].append(fetch)
            fetch.remaining += 1
        self.touch(present)
        self._begin_reads()
        return fetch

    def is_pending(self, fetch: DiskFetch) -> bool:
        """Return whether to wait: some blocks must still arrive, and the deadline has not passed."""
        if fetch.remaining == 0:
            return False
        if time.monotonic() < fetch.deadline:
            return True
        if not fetch.expired and self._disk is not None:
            fetch.expired = True
            self._disk.counters.fetch_timeouts += 1
        return False

    def poll(self) -> None:
        """Take up the jobs that the disk has done, and queue more reads and writes."""
        if self._disk is not None:
            self._collect()
            self._begin_reads()
            self._begin_writes(self._max_writing)

    # --- state and counters, for any thread ---------------------------------------------------------

    @property
    def num_blocks(self) -> int:
        return len(self._slot_of)

    @property
    def num_disk_queued(self) -> int:
        """Number of blocks to be read or written."""
        return self._disk.num_queued + len(self._unwritten) if self._disk is not None else 0

    def totals(self) -> dict[str, float]:
        """Return gauges and counters in Prometheus' naming, with units of bytes and seconds in the names."""
        totals = {f"kv_host_{name}_total": value for name, value in asdict(self.counters).items()}
        totals |= {"kv_host_blocks": self.capacity, "kv_host_used_blocks": self.num_blocks}
        if self._disk is not None:
            totals |= {
                "kv_disk_blocks": self._disk.capacity,
                "kv_disk_used_blocks": self._disk.num_blocks,
                "kv_disk_queued_blocks": self.num_disk_queued,
            }
            disk = asdict(self._disk.counters)
            totals |= {f"kv_disk_{name}_total": value for name, value in disk.items()}
        return totals

    def describe(self) -> str:
        text = f"host: {self.capacity} blocks"
        if self._disk is not None:
            text += f"; disk: {self._disk.num_blocks} of {self._disk.capacity} blocks found again"
        return text

    def close(self) -> None:
        """Write blocks that are not on the disk yet, for at most `CLOSE_TIMEOUT_S`. Idempotent."""
        if self._disk is not None:
            self._collect()
            self._begin_writes(self.capacity)
            self._disk.close()

    # --- inside -------------------------------------------------------------------------------------

    def _keep(self, identity: BlockIdentity, slot: int) -> None:
        self._slot_of[identity] = slot
        if self._log is not None:
            self._log.stored(Medium.CPU, identity)

    def _take_slot(self, may_drop: bool) -> int | None:
        """Return a slot to fill: a free one, or the least recently used block's. Return None without one."""
        full = len(self._slot_of) + self._num_reading >= self.capacity
        if full and not self._give_up_oldest(may_drop):
            return None
        return self._free.pop()

    def _give_up_oldest(self, may_drop: bool) -> bool:
        """Evict the oldest block. Return False if all are being written, or it must not be dropped."""
        disk = self._disk
        identity = next((i for i in self._slot_of if disk is None or not disk.is_writing(i)), None)
        if identity is None or (identity in self._unwritten and not may_drop):
            return False
        self._free.append(self._slot_of.pop(identity))
        self.counters.evicted_blocks += 1
        if self._log is not None:
            self._log.removed(Medium.CPU, identity)
        if disk is not None and identity in self._unwritten:
            del self._unwritten[identity]
            disk.counters.dropped_blocks += 1
        elif disk is not None and disk.holds(identity):
            disk.touch(identity)
        return True

    def _begin_writes(self, limit: int) -> None:
        disk = self._disk
        while disk is not None and self._unwritten and disk.num_writing < limit and disk.can_write:
            identity, _ = self._unwritten.popitem(last=False)
            disk.write(identity, self._slot_of[identity])

    def _begin_reads(self) -> None:
        disk = self._disk
        while disk is not None and self._wanted and self._num_reading < self._max_reading:
            identity = self._wanted[0]
            now = time.monotonic()
            if all(now >= fetch.deadline for fetch in self._fetches[identity]) or not disk.holds(identity):
                self._arrived(self._wanted.popleft())
                continue
            slot = self._take_slot(may_drop=False)
            if slot is None:
                return
            disk.read(self._wanted.popleft(), slot)
            self._num_reading += 1

    def _collect(self) -> None:
        for job in self._disk.finished() if self._disk is not None else ():
            if not job.is_read:
                continue
            self._num_reading -= 1
            if job.done and job.identity not in self._slot_of:
                self._keep(job.identity, job.host_slot)
            else:
                self._free.append(job.host_slot)
            self._arrived(job.identity)

    def _arrived(self, identity: BlockIdentity) -> None:
        """End the wait of all fetches for the block."""
        for fetch in self._fetches.pop(identity):
            fetch.remaining -= 1
