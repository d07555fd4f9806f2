"""Blocks whose content follows from their identity, and parts of the tiers over plain memory."""

from __future__ import annotations

import hashlib
import json
import random
import sys
import threading
import time
from dataclasses import asdict
from pathlib import Path

from engine.kv.tiers.disk import DiskTier
from engine.kv.tiers.slot_file import SlotFile, claim_folder
from protocol.ids import BlockIdentity

MODEL = b"sixteen bytes..."


def identity_of(number: int) -> BlockIdentity:
    return hashlib.blake2b(str(number).encode(), digest_size=16).digest()


def content_of(identity: BlockIdentity, num_bytes: int) -> bytes:
    return random.Random(identity).randbytes(num_bytes)


def open_file(folder: Path, block_bytes: int, capacity: int, model: bytes = MODEL) -> SlotFile:
    return SlotFile(claim_folder(folder), block_bytes, capacity, model)


def write_blocks(file: SlotFile, numbers: range) -> None:
    """Write block `number` into slot `number`."""
    for number in numbers:
        identity = identity_of(number)
        file.write(number, identity, number, memoryview(content_of(identity, file.block_bytes)))


def check_blocks(file: SlotFile) -> int:
    """Read and check all blocks of the file. Return their number."""
    into = bytearray(file.block_bytes)
    for stored in file.stored:
        file.read(stored.slot, stored.identity, memoryview(into))
        assert into == content_of(stored.identity, file.block_bytes)
    return len(file.stored)


class PlainMemory:
    """A pool and a host memory of byte strings in place of tensors."""

    def __init__(self, num_slots: int, block_bytes: int) -> None:
        self.num_slots = num_slots
        self.block_bytes = block_bytes
        self.pool: dict[int, bytes] = {}
        self.slots = [bytearray(block_bytes) for _ in range(num_slots)]

    def save(self, block: int, slot: int) -> None:
        self.slots[slot][:] = self.pool[block]

    def load(self, slot: int, block: int) -> None:
        self.pool[block] = bytes(self.slots[slot])

    def buffer(self, slot: int) -> memoryview:
        return memoryview(self.slots[slot])


class StuckFile(SlotFile):
    """A disk that answers only after `go`."""

    go: threading.Event

    def write(self, slot: int, identity: BlockIdentity, age: int, data: memoryview) -> None:
        assert self.go.wait(30)
        super().write(slot, identity, age, data)

    def read(self, slot: int, identity: BlockIdentity, into: memoryview) -> None:
        assert self.go.wait(30)
        super().read(slot, identity, into)


LIFE_S = 60.0
"""A limit, so that a failing test leaves nothing running."""


def main(folder: str, block_bytes: int, capacity: int, first: int, count: int) -> None:
    """Write blocks to a disk tier, and print `ready` once the first one is written.

    With a `count` of 0 this continues until the process is killed. Otherwise it closes the tier and prints
    its counters as JSON.
    """
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
