"""Blocks in a file of fixed-size slots, with an index file that has an entry for each slot.

Filling a slot takes one write for the block and two writes of 64 bytes for its entry, and no file-system
metadata; with a file for each block, creating the file would cost as much as writing a small block. The entry
is cleared before the block is written and set after it, so a process that is killed at any point leaves a
whole block or no block. The checksum, which every read verifies, finds other faults: power loss, disk errors,
a file that someone changed. Processes that share a path each claim a folder of their own in it.
"""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from native.ownership import check_own, open_own
from protocol.errors import ConfigError
from protocol.ids import BlockIdentity

logger = logging.getLogger("tandem.engine")

VERSION = 1
MAX_WORKERS = 1024
_HEADER = struct.Struct("<8sIIQ16s20x")  # magic, version, bytes of an entry, bytes of a block, model
_ENTRY = struct.Struct("<4s16sQQI20x")  # magic, identity, age, bytes of the block, its checksum
_SEAL = struct.Struct("<I")
ENTRY_BYTES = _ENTRY.size + _SEAL.size
_NO_ENTRY = bytes(ENTRY_BYTES)
_FILE_MAGIC, _ENTRY_MAGIC = b"TANDEMKV", b"KVBL"


class CorruptBlockError(Exception):
    """A slot that does not hold the expected block."""


class StoredBlock(NamedTuple):
    age: int
    """Sequence number of the block's write."""
    identity: BlockIdentity
    slot: int


@dataclass(frozen=True)
class ClaimedFolder:
    """A folder that is locked until `release` or the end of the process: the kernel drops the lock."""

    path: Path
    lock_fd: int

    def release(self) -> None:
        os.close(self.lock_fd)


def claim_folder(parent: Path) -> ClaimedFolder:
    """Claim the first of `parent`/worker-0, worker-1, ... that no living process has claimed.

    A block is found by its identity only, so it does not matter which worker used the folder before. Raise
    `ConfigError`, naming the flag.
    """
    try:
        for number in range(MAX_WORKERS):
            folder = parent / f"worker-{number}"
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            check_own(folder)
            lock_fd = _try_lock(folder / "lock")
            if lock_fd is not None:
                return ClaimedFolder(folder, lock_fd)
    except OSError as error:
        raise ConfigError(f"--kv-disk-path: cannot use {parent}: {error}") from error
    raise ConfigError(f"--kv-disk-path: {parent} is in use by {MAX_WORKERS} workers")


def _try_lock(path: Path) -> int | None:
    fd = open_own(path, os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        return None
    except OSError:
        os.close(fd)
        raise
    return fd


def check_free_space(folder: Path, wanted: int) -> None:
    """Raise `ConfigError` unless `wanted` bytes fit, including the space of our existing files."""
    present = sum(file.stat().st_blocks * 512 for file in folder.iterdir() if file.is_file())
    room = shutil.disk_usage(folder).free + present
    if wanted > room:
        raise ConfigError(
            f"--kv-disk-size: {wanted / 2**30:.3g} GiB are asked for, "
            f"{folder} has room for {room / 2**30:.3g} GiB"
        )


class SlotFile:
    """`capacity` slots of `block_bytes`, in the files `index` and `blocks` of `folder`. The files grow as
    needed; `close` releases the folder.

    `model` (16 bytes) identifies the model: files of another model, format or version are emptied. One
    thread at a time may call methods. They raise OSError.
    """

    def __init__(self, folder: ClaimedFolder, block_bytes: int, capacity: int, model: bytes) -> None:
        self.path = folder.path
        self._folder = folder
        self.block_bytes = block_bytes
        self.capacity = capacity
        self.num_allocated = 0
        """Number of slots that are allocated on the disk."""
        self.num_foreign = 0
        self.num_corrupt = 0
        """Number of entries dropped when the file was opened."""
        self._header = _sealed(_HEADER.pack(_FILE_MAGIC, VERSION, ENTRY_BYTES, block_bytes, model))
        self._index = open_own(folder.path / "index", os.O_RDWR | os.O_CREAT)
        self._blocks = open_own(folder.path / "blocks", os.O_RDWR | os.O_CREAT)
        self.stored = self._attach(folder.path)
        """The blocks that were found when the file was opened, oldest first."""

    def write(self, slot: int, identity: BlockIdentity, age: int, data: memoryview) -> None:
        if slot >= self.num_allocated:
            self._grow(slot)
        self.erase(slot)
        _write_all(self._blocks, data, slot * self.block_bytes)
        checksum = _checksum(identity, data)
        entry = _sealed(_ENTRY.pack(_ENTRY_MAGIC, identity, age, len(data), checksum))
        _write_all(self._index, memoryview(entry), _entry_offset(slot))

    def read(self, slot: int, identity: BlockIdentity, into: memoryview) -> None:
        """Read the slot; raise `CorruptBlockError` if it does not hold the whole block `identity`."""
        entry = _parse(os.pread(self._index, ENTRY_BYTES, _entry_offset(slot)))
        if entry is None or entry[0] != identity:
            raise CorruptBlockError(f"slot {slot} has no entry of the block")
        num_read = 0
        while num_read < len(into):
            count = os.preadv(self._blocks, [into[num_read:]], slot * self.block_bytes + num_read)
            if count == 0:
                raise CorruptBlockError(f"slot {slot} lies beyond the end of the file")
            num_read += count
        if entry[2] != len(into) or entry[3] != _checksum(identity, into):
            raise CorruptBlockError(f"slot {slot} holds other bytes than were written")

    def announce(self, slot: int) -> None:
        """Tell the kernel that the block will soon be read. The kernel's own read-ahead does not find it,
        since a prompt's last blocks were written first."""
        os.posix_fadvise(self._blocks, slot * self.block_bytes, self.block_bytes, os.POSIX_FADV_WILLNEED)

    def erase(self, slot: int) -> None:
        _write_all(self._index, memoryview(_NO_ENTRY), _entry_offset(slot))

    def close(self) -> None:
        os.close(self._index)
        os.close(self._blocks)
        self._folder.release()

    def _grow(self, slot: int) -> None:
        start = slot * self.block_bytes
        try:
            os.posix_fallocate(self._blocks, start, self.block_bytes)
        except OSError:
            os.ftruncate(self._blocks, self.num_allocated * self.block_bytes)
            raise
        self.num_allocated = slot + 1

    def _attach(self, folder: Path) -> list[StoredBlock]:
        header = os.pread(self._index, len(self._header), 0)
        if header != self._header:
            if header:
                self.num_foreign += 1
                logger.warning("%s holds blocks of another model or format, or is damaged: emptied", folder)
            os.ftruncate(self._index, 0)
            os.ftruncate(self._blocks, 0)
            _write_all(self._index, memoryview(self._header), 0)
        os.ftruncate(self._index, min(os.fstat(self._index).st_size, _entry_offset(self.capacity)))
        self.num_allocated = min(self.capacity, os.fstat(self._blocks).st_size // self.block_bytes)
        os.ftruncate(self._blocks, self.num_allocated * self.block_bytes)
        return self._read_index(folder)

    def _read_index(self, folder: Path) -> list[StoredBlock]:
        raw = os.pread(self._index, self.capacity * ENTRY_BYTES, _entry_offset(0))
        newest: dict[BlockIdentity, StoredBlock] = {}
        for slot in range(len(raw) // ENTRY_BYTES):
            packed = raw[slot * ENTRY_BYTES : (slot + 1) * ENTRY_BYTES]
            if packed == _NO_ENTRY:
                continue
            entry = _parse(packed)
            if entry is None or entry[2] != self.block_bytes or slot >= self.num_allocated:
                self.num_corrupt += 1
                self.erase(slot)
                continue
            block = StoredBlock(entry[1], entry[0], slot)
            known = newest.setdefault(block.identity, block)
            if known is not block:
                self.erase(min(known, block).slot)
                newest[block.identity] = max(known, block)
        if self.num_corrupt:
            logger.warning("%s: %d damaged entries dropped", folder, self.num_corrupt)
        return sorted(newest.values())


def _entry_offset(slot: int) -> int:
    return ENTRY_BYTES * (slot + 1)


def _sealed(packed: bytes) -> bytes:
    return packed + _SEAL.pack(zlib.crc32(packed))


def _parse(sealed: bytes) -> tuple[BlockIdentity, int, int, int] | None:
    """Return (identity, age, bytes, checksum) of an entry; None if it is not valid."""
    packed = sealed[: _ENTRY.size]
    if len(sealed) != ENTRY_BYTES or _sealed(packed) != sealed:
        return None
    magic, identity, age, length, checksum = _ENTRY.unpack(packed)
    return (identity, age, length, checksum) if magic == _ENTRY_MAGIC else None


def _checksum(identity: BlockIdentity, data: memoryview) -> int:
    return zlib.crc32(data, zlib.crc32(identity))


def _write_all(fd: int, data: memoryview, offset: int) -> None:
    while data:
        written = os.pwrite(fd, data, offset)
        data, offset = data[written:], offset + written
