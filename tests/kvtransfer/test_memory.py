"""Where a pool's memory comes from."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import numpy as np
import pytest

from kvtransfer.blocks.memory import allocate, map_peer_pool

NBYTES = 8 * 1024 * 1024
THP = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def mapping_flags(address: int) -> list[str]:
    """The kernel's flags of the mapping that holds `address`."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first = line.split()[0]
        if "-" in first and not first.endswith(":"):
            start, end = (int(part, 16) for part in first.split("-"))
            inside = start <= address < end
        elif inside and first == "VmFlags:":
            return line.split()[1:]
    raise AssertionError("no such mapping")


@pytest.mark.parametrize("shared", [False, True])
def test_memory_is_zeroed_and_writable(shared: bool) -> None:
    memory = allocate(NBYTES, shared=shared)
    assert memory.buffer.nbytes == NBYTES
    assert not np.frombuffer(memory.buffer, dtype=np.uint8).any()
    memory.buffer[-1] = 7
    assert memory.buffer[-1] == 7
    assert (memory.fd is not None) == shared
    memory.close()
    memory.close()


def test_only_the_owner_writes_to_shared_memory() -> None:
    memory = allocate(NBYTES)
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


@pytest.mark.skipif(not THP.exists(), reason="this kernel has no transparent huge pages")
def test_huge_pages_are_asked_for() -> None:
    memory = allocate(NBYTES, shared=False)
    assert "hg" in mapping_flags(np.frombuffer(memory.buffer, dtype=np.uint8).ctypes.data)
