"""The disk tier: blocks of the host tier, written and read by a separate thread.

The engine's thread owns the index of blocks and never waits for the disk: it queues a job, which writes or
fills a slot of host memory, and learns later that the job is done. Reads go before writes. So a slot of the
file is unchanged between queueing and executing a read: only a write that was queued later may reuse it.
"""

from __future__ import annotations

import errno
import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, KeysView
from dataclasses import dataclass

from engine.kv.cache_events import CacheLog
from engine.kv.tiers.slot_file import CorruptBlockError, SlotFile
from protocol.ids import BlockIdentity
from protocol.kv_events import Medium

logger = logging.getLogger("tandem.engine")

CLOSE_TIMEOUT_S = 5.0
LOG_INTERVAL_S = 60.0
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@dataclass
class DiskCounters:
    hit_blocks: float = 0
    miss_blocks: float = 0
    written_blocks: float = 0
    written_bytes: float = 0
    write_seconds: float = 0
    read_bytes: float = 0
    read_seconds: float = 0
    evicted_blocks: float = 0
    dropped_blocks: float = 0
    """Number of blocks not written because the disk was too slow or full."""
    corrupt_blocks: float = 0
    foreign_files: float = 0
    io_errors: float = 0
    fetch_timeouts: float = 0


@dataclass(eq=False)
class Job:
    """A copy of a block between a slot of the file and a slot of host memory, which no other code changes."""

    identity: BlockIdentity
    slot: int
    host_slot: int
    is_read: bool
    age: int = 0
    done: bool = False
    no_room: bool = False


class DiskTier:
    """The index of blocks on the disk, and the thread that reads and writes them.

    `buffer` returns the bytes of a host slot. Only the engine's thread may call methods, except `close`. The
    disk's thread calls `on_read` when all queued reads are done.
    """

    def __init__(
        self,
        file: SlotFile,
        buffer: Callable[[int], memoryview],
        on_read: Callable[[], None] = lambda: None,
    ) -> None:
        self.counters = DiskCounters(corrupt_blocks=file.num_corrupt, foreign_files=file.num_foreign)
        self.capacity = file.capacity
        self.log: CacheLog | None = None
        self._file = file
        self._buffer = buffer
        self._on_read = on_read
        self._slot_of = OrderedDict((stored.identity, stored.slot) for stored in file.stored)
        taken = set(self._slot_of.values())
        self._free = [slot for slot in range(file.capacity - 1, -1, -1) if slot not in taken]
        self._age = max((stored.age for stored in file.stored), default=0)
        self._writing: set[BlockIdentity] = set()
        self._reads: deque[Job] = deque()
        self._announced: deque[int] = deque()
        """Slots that will soon be read, and are not announced to the kernel yet."""
        self._writes: deque[Job] = deque()
        self._finished: deque[Job] = deque()
        self._changed = threading.Condition()
        self._num_queued = 0
        self._closing = False
        self._silent_until = 0.0
        self._thread = threading.Thread(target=self._run, name="kv-disk", daemon=True)
        self._thread.start()

    @property
    def num_blocks(self) -> int:
        return len(self._slot_of)

    @property
    def num_queued(self) -> int:
        """Number of blocks that the disk's thread must still read or write."""
        return self._num_queued

    @property
    def can_write(self) -> bool:
        """Whether a block may be written. False if the disk was full from the start, or when closing."""
        return bool(self._free or self._slot_of) and not self._closing

    @property
    def num_writing(self) -> int:
        return len(self._writing)

    def is_writing(self, identity: BlockIdentity) -> bool:
        return identity in self._writing

    def holds(self, identity: BlockIdentity) -> bool:
        return identity in self._slot_of

    def stored(self) -> KeysView[BlockIdentity]:
        """Return all blocks that can be read."""
        return self._slot_of.keys()

    def touch(self, identity: BlockIdentity) -> None:
        """Mark the block as recently used, so that others are evicted before it."""
        self._slot_of.move_to_end(identity)

    def write(self, identity: BlockIdentity, host_slot: int) -> None:
        """Queue a write. A full disk evicts its least recently used block. Call only if `can_write`."""
        if not self._free:
            oldest, slot = self._slot_of.popitem(last=False)
            self.counters.evicted_blocks += 1
            if self.log is not None:
                self.log.removed(Medium.STORAGE, oldest)
        else:
            slot = self._free.pop()
        self._age += 1
        self._writing.add(identity)
        self._submit(Job(identity, slot, host_slot, is_read=False, age=self._age), self._writes)

    def read(self, identity: BlockIdentity, host_slot: int) -> None:
        """Queue a read. Call only if the disk `holds` the block."""
        job = Job(identity, self._slot_of[identity], host_slot, is_read=True)
        self._announced.append(job.slot)
        self._submit(job, self._reads)

    def finished(self) -> Iterator[Job]:
        """Yield the jobs done since the last call."""
        while self._finished:
            job = self._finished.popleft()
            if job.is_read:
                self._after_read(job)
            else:
                self._after_write(job)
            yield job

    def close(self) -> None:
        """Execute the queued jobs, then end the thread. Idempotent."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join(CLOSE_TIMEOUT_S)

    # --- the engine's thread ------------------------------------------------------------------------

    def _submit(self, job: Job, queue: deque[Job]) -> None:
        with self._changed:
            queue.append(job)
            self._num_queued += 1
            self._changed.notify()

    def _after_read(self, job: Job) -> None:
        if not job.done and self._slot_of.get(job.identity) == job.slot:
            del self._slot_of[job.identity]
            self._free.append(job.slot)
            if self.log is not None:
                self.log.removed(Medium.STORAGE, job.identity)

    def _after_write(self, job: Job) -> None:
        self._writing.discard(job.identity)
        if job.done:
            self._slot_of[job.identity] = job.slot
            if self.log is not None:
                self.log.stored(Medium.STORAGE, job.identity)
            return
        self.counters.dropped_blocks += 1
        if job.no_room and job.slot >= self._file.num_allocated:
            self.capacity = self._file.num_allocated
            self._free = [slot for slot in self._free if slot < self.capacity]
        else:
            self._free.append(job.slot)

    # --- the disk's thread --------------------------------------------------------------------------

    def _run(self) -> None:
        while (job := self._next()) is not None:
            started = time.perf_counter()
            try:
                self._do(job)
                job.done = True
            except CorruptBlockError as error:
                self.counters.corrupt_blocks += 1
                self._warn(f"a KV block on the disk is damaged and was dropped: {error}")
            except OSError as error:
                self.counters.io_errors += 1
                job.no_room = error.errno in _NO_ROOM
                self._warn(f"--kv-disk-path: {'reading' if job.is_read else 'writing'} a block: {error}")
            self._count(job, time.perf_counter() - started)
            self._finished.append(job)
            with self._changed:
                self._num_queued -= 1
            if job.is_read and not self._reads:
                self._on_read()
        self._file.close()

    def _next(self) -> Job | None:
        with self._changed:
            while not self._reads and not self._writes and not self._closing:
                self._changed.wait()
            if self._reads:
                return self._reads.popleft()
            return self._writes.popleft() if self._writes else None

    def _do(self, job: Job) -> None:
        data = self._buffer(job.host_slot)
        if not job.is_read:
            self._file.write(job.slot, job.identity, job.age, data)
            return
        while self._announced:
            self._file.announce(self._announced.popleft())
        try:
            self._file.read(job.slot, job.identity, data)
        except CorruptBlockError:
            self._file.erase(job.slot)
            raise

    def _count(self, job: Job, seconds: float) -> None:
        counters = self.counters
        if job.is_read:
            counters.read_seconds += seconds
            counters.read_bytes += self._file.block_bytes * job.done
            counters.hit_blocks += job.done
        else:
            counters.write_seconds += seconds
            counters.written_bytes += self._file.block_bytes * job.done
            counters.written_blocks += job.done

    def _warn(self, message: str) -> None:
        now = time.monotonic()
        if now >= self._silent_until:
            self._silent_until = now + LOG_INTERVAL_S
            logger.warning("%s (logged at most once in %.0f s)", message, LOG_INTERVAL_S)
