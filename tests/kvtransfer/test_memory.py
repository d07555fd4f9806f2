"""The memory of pools: shared, zeroed, writable by its owner alone, in huge pages."""

from __future__ import annotations

import contextlib
import gc
import mmap
import os
import time
from pathlib import Path

import numpy as np
import pytest

from kvtransfer.blocks.memory import PoolMemory, map_peer_pool
from tests.waiting import wait_until

MIB = 1024 * 1024
NBYTES = 8 * MIB
THP = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def details(memory: memoryview) -> dict[str, list[str]]:
    """Return the kernel's description of a mapping, by its own field names."""
    address, inside, found = int(np.frombuffer(memory, np.uint8).ctypes.data), False, {}
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, *values = line.split()
        if not name.endswith(":"):
            start, end = (int(part, 16) for part in name.split("-"))
            inside = start <= address < end
        elif inside:
            found[name[:-1]] = values
    return found


@pytest.mark.parametrize("shared", [False, True])
def test_memory_is_zeroed_and_writable(shared: bool) -> None:
    memory = PoolMemory(NBYTES, shared=shared)
    assert memory.buffer.nbytes == NBYTES
    assert not np.frombuffer(memory.buffer, dtype=np.uint8).any()
    memory.buffer[-1] = 7
    assert memory.buffer[-1] == 7
    assert (memory.fd is not None) == shared
    memory.close()
    memory.close()


def test_only_the_owner_writes_to_shared_memory() -> None:
    memory = PoolMemory(NBYTES)
    assert memory.fd is not None
    theirs = map_peer_pool(memory.fd, NBYTES)
    memory.buffer[5] = 9
    assert theirs[5] == 9
    with pytest.raises(PermissionError):
        mmap.mmap(memory.fd, NBYTES)
    with pytest.raises(PermissionError):
        os.pwrite(memory.fd, b"x", 0)
    theirs.close()
    memory.close()


def test_the_descriptor_closes_with_the_last_view() -> None:
    memory = PoolMemory(NBYTES)
    descriptor, view = memory.fd, memory.buffer[5:]
    assert descriptor is not None
    memory.close()
    del memory
    inode = os.fstat(descriptor).st_ino
    del view
    gc.collect()
    deadline = time.monotonic() + 10  # the thread that requests huge pages may hold the memory for a moment
    with contextlib.suppress(OSError):  # it is closed, or another thread has got its number
        while os.fstat(descriptor).st_ino == inode:
            assert time.monotonic() < deadline, "the descriptor is still open"
            time.sleep(0.01)


@pytest.mark.skipif(not THP.exists(), reason="this kernel has no transparent huge pages")
def test_huge_pages_are_requested() -> None:
    memory = PoolMemory(NBYTES, shared=False)
    assert "hg" in details(memory.buffer)["VmFlags"]


@pytest.mark.skipif(not THP.exists(), reason="this kernel has no transparent huge pages")
def test_used_shared_memory_gets_huge_pages() -> None:
    """Memory beyond the used part is not allocated, and written bytes stay."""
    memory = PoolMemory(64 * MIB)
    content = np.random.default_rng(0).integers(0, 256, 18 * MIB, dtype=np.uint8)
    values = np.frombuffer(memory.buffer, dtype=np.uint8)
    values[: 18 * MIB] = content
    deadline = time.monotonic() + 20
    while details(memory.buffer)["ShmemPmdMapped"][0] != str(32 * 1024):
        assert time.monotonic() < deadline, details(memory.buffer)
        time.sleep(0.05)
    assert np.array_equal(values[: 18 * MIB], content)
    assert not values[18 * MIB : 32 * MIB].any()
    assert details(memory.buffer)["Rss"][0] == str(32 * 1024)


def test_a_kernel_without_huge_shared_pages_is_reported(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("kvtransfer.blocks.memory._MADV_COLLAPSE", -1)
    memory = PoolMemory(NBYTES)
    memory.buffer[0] = 1
    wait_until(lambda: caplog.messages)
    assert "stays on small pages" in caplog.messages[0]
