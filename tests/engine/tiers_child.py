"""Writes blocks to a disk tier in a separate process: `FOLDER BLOCK_BYTES CAPACITY FIRST COUNT`.

It prints `ready` once the first block is written. With COUNT 0 it continues until it is killed. Otherwise it
closes the tier and prints its counters as JSON.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict
from pathlib import Path

from engine.kv.tiers.disk import DiskTier
from tests.engine.tiers_parts import PlainMemory, content_of, identity_of, open_file

LIFE_S = 60.0
"""A limit, so that a failing test leaves nothing running."""


def main(folder: str, block_bytes: int, capacity: int, first: int, count: int) -> None:
    memory = PlainMemory(num_slots=4, block_bytes=block_bytes)
    disk = DiskTier(open_file(Path(folder), block_bytes, capacity), memory.buffer)
    free = list(range(memory.num_slots))
    number, said, deadline = first, False, time.monotonic() + LIFE_S
    while time.monotonic() < deadline and (not count or number < first + count):
        free.extend(job.host_slot for job in disk.finished())
        if disk.counters.written_blocks and not said:
            print("ready", flush=True)
            said = True
        if free and not disk.can_write:
            break  # no room at all
        if free:
            slot, identity = free.pop(), identity_of(number)
            memory.slots[slot][:] = content_of(identity, block_bytes)
            disk.write(identity, slot)
            number += 1
        else:
            time.sleep(0.0002)
    disk.close()
    list(disk.finished())
    print(json.dumps(asdict(disk.counters)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
