"""The soak's measure of memory growth."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

from bench.soak import written_bytes

SIZE = 64 * 2**20
SLACK = 8 * 2**20


def touch(memory: mmap.mmap) -> None:
    for place in range(0, SIZE, mmap.PAGESIZE):
        assert memory[place] in (0, 1)


def test_written_memory_counts_and_file_pages_do_not(tmp_path: Path) -> None:
    file = tmp_path / "library"
    file.write_bytes(bytes(SIZE))
    before = written_bytes(os.getpid())
    with (
        file.open("rb") as opened,
        mmap.mmap(opened.fileno(), SIZE, mmap.MAP_PRIVATE, mmap.PROT_READ) as read,
    ):
        touch(read)
        assert abs(written_bytes(os.getpid()) - before) < SLACK
    with mmap.mmap(-1, SIZE, mmap.MAP_PRIVATE) as written:
        for place in range(0, SIZE, mmap.PAGESIZE):
            written[place] = 1
        touch(written)
        assert abs(written_bytes(os.getpid()) - before - SIZE) < SLACK
