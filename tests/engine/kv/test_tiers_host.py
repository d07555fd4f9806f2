"""The host tier over a real disk tier: where blocks go, which are dropped, and what is never waited for."""

from __future__ import annotations

import random
import threading
from pathlib import Path
from typing import Any

import pytest

from engine.kv.cache_events import CacheLog
from engine.kv.tiers import host as host_module
from engine.kv.tiers.disk import DiskTier
from engine.kv.tiers.host import DiskFetch, Evicted, HostTier
from tests.engine.listener import Listener, held_below
from tests.engine.tiers_parts import PlainMemory, StuckFile, content_of, identity_of, open_file
from tests.tiers.seeds import seeds
from tests.waiting import wait_until

BLOCK_BYTES = 256


class Rig:
    """A pool, a host tier and a disk tier."""

    def __init__(self, folder: Path, host_slots: int = 8, disk_slots: int = 32) -> None:
        self.memory = PlainMemory(host_slots, BLOCK_BYTES)
        self.file = open_file(folder, BLOCK_BYTES, disk_slots)
        self.woken = threading.Event()
        self.disk = DiskTier(self.file, self.memory.buffer, self.woken.set)
        memory: Any = self.memory
        self.host = HostTier(memory, self.disk)
        self.log, self.listener = CacheLog([]), Listener()
        self.listener.held.update(self.host.contents())
        self.host.watch(self.log)

    def evict(self, *numbers: int) -> None:
        """Evict blocks from the pool, and give the disk the time that it needs."""
        for number in numbers:
            identity = identity_of(number)
            self.memory.pool[0] = content_of(identity, BLOCK_BYTES)
            self.host.save([Evicted(identity, 0)])
            self.settle()

    def settle(self) -> None:
        def idle() -> bool:
            self.host.poll()
            return self.host.num_disk_queued == 0

        wait_until(idle)
        self.host.poll()

    def fetch(self, *numbers: int) -> DiskFetch:
        fetch = self.host.fetch(map(identity_of, numbers))
        self.wait(fetch)
        return fetch

    def wait(self, fetch: DiskFetch) -> None:
        def arrived() -> bool:
            self.host.poll()
            return fetch.remaining == 0

        wait_until(arrived)

    def load(self, *numbers: int) -> int:
        """Load into pool blocks 100, 101, ... and check their content."""
        blocks = range(100, 100 + len(numbers))
        identities = [identity_of(number) for number in numbers]
        count = self.host.load(identities, blocks)
        for identity, block in list(zip(identities, blocks, strict=True))[:count]:
            assert self.memory.pool[block] == content_of(identity, BLOCK_BYTES)
        return count

    def in_host(self, *numbers: int) -> list[int]:
        return [number for number in numbers if self.host.holds(identity_of(number))]

    def on_disk(self, *numbers: int) -> list[int]:
        return [number for number in numbers if self.disk.holds(identity_of(number))]

    def count(self, name: str) -> float:
        return self.host.totals()[f"kv_{name}_total"]

    def check_slots(self) -> None:
        """Check that every slot of host memory is free or holds a block, and that nothing is lent."""
        assert len(self.host._free) + self.host.num_blocks == self.memory.num_slots
        assert len(self.disk._free) + self.disk.num_blocks == self.disk.capacity


@pytest.fixture
def make_rig(tmp_path: Path):
    rigs: list[Rig] = []

    def make(**options: int) -> Rig:
        rigs.append(Rig(tmp_path, **options))
        return rigs[-1]

    yield make
    for rig in rigs:
        rig.listener.hear(rig.log.take())
        assert rig.listener.held == held_below(rig.host), "the log tells what is held"
        rig.host.close()


def test_the_oldest_blocks_go_to_the_disk_and_return(make_rig) -> None:
    rig = make_rig()
    rig.evict(*range(10))
    assert rig.in_host(*range(10)) == list(range(2, 10))
    assert rig.on_disk(*range(10)) == list(range(10))
    assert rig.load(0, 1) == 0
    fetch = rig.fetch(0, 1)
    assert not rig.host.is_pending(fetch)
    assert rig.load(0, 1, 4, 3) == 3  # two made room for them
    assert rig.woken.is_set()
    assert (rig.count("disk_hit_blocks"), rig.count("host_hit_blocks")) == (2, 3)
    assert rig.count("disk_read_bytes") == 2 * BLOCK_BYTES
    rig.check_slots()


def test_a_block_that_a_lower_tier_has_is_not_copied_again(make_rig) -> None:
    rig = make_rig()
    rig.evict(0, 1, 2)
    rig.evict(1)
    assert rig.count("host_saved_blocks") == 3
    rig.evict(*range(3, 10))
    assert rig.in_host(*range(10)) == [1, *range(3, 10)]  # it was used later than 0 and 2
    rig.fetch(0)
    rig.evict(1)
    assert rig.count("host_saved_blocks") == 11
    assert rig.count("disk_written_blocks") == 10
    assert rig.count("disk_written_bytes") == 10 * BLOCK_BYTES
    rig.check_slots()


def test_touched_blocks_stay_longest_the_first_one_the_longest(make_rig) -> None:
    rig = make_rig()
    rig.evict(*range(8))
    rig.host.touch([identity_of(0), identity_of(1)])
    rig.evict(*range(10, 17))
    assert rig.in_host(*range(8)) == [0]


def test_a_fetch_counts_missing_blocks(make_rig) -> None:
    rig = make_rig(host_slots=16)
    rig.evict(*range(20))
    fetch = rig.host.fetch(map(identity_of, [0, 1]), num_unknown=2)
    assert fetch.remaining == 2
    assert rig.count("disk_miss_blocks") == 2
    rig.wait(fetch)
    assert rig.in_host(0, 1, 2) == [0, 1]
    rig.check_slots()


def test_a_fetch_does_not_displace_its_own_prefix(make_rig) -> None:
    rig = make_rig()
    rig.evict(*range(12))  # 4 is the oldest in host memory
    rig.fetch(4, 0, 1, 2)
    assert rig.load(4, 0, 1, 2) == 4


def test_two_fetches_of_the_same_block_read_it_once(make_rig) -> None:
    rig = make_rig(host_slots=16)
    rig.evict(*range(20))
    first, second = (rig.host.fetch(map(identity_of, [0, 1])) for _ in range(2))
    rig.wait(first)
    rig.wait(second)
    assert rig.count("disk_hit_blocks") == 2
    rig.check_slots()


def test_a_fetch_takes_at_most_half_of_the_host(make_rig) -> None:
    rig = make_rig()
    rig.evict(*range(20))
    assert rig.host.fetch(map(identity_of, range(14))).remaining == 4


def test_without_a_disk_nothing_is_waited_for() -> None:
    memory: Any = PlainMemory(2, BLOCK_BYTES)
    tier = HostTier(memory)
    assert not tier.is_pending(tier.fetch(map(identity_of, range(3))))
    assert not any(name.startswith("kv_disk") for name in tier.totals())


@pytest.fixture
def stuck_rig(make_rig, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("tests.engine.tiers_parts.SlotFile", StuckFile)
    monkeypatch.setattr(StuckFile, "go", threading.Event(), raising=False)
    yield make_rig()
    StuckFile.go.set()


def test_blocks_that_the_disk_cannot_take_in_time_are_dropped(stuck_rig: Rig) -> None:
    rig = stuck_rig
    for number in range(20):
        rig.memory.pool[0] = content_of(identity_of(number), BLOCK_BYTES)
        rig.host.save([Evicted(identity_of(number), 0)])
    assert rig.in_host(*range(20)) == [0, 1, *range(14, 20)]
    assert rig.count("disk_dropped_blocks") == 12
    StuckFile.go.set()
    rig.settle()
    assert rig.on_disk(*range(20)) == [0, 1, *range(14, 20)]
    rig.check_slots()


def test_a_slow_disk_is_waited_for_until_the_deadline(
    stuck_rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = stuck_rig
    StuckFile.go.set()
    rig.evict(*range(20))
    StuckFile.go.clear()
    monkeypatch.setattr(host_module, "FETCH_TIMEOUT_S", 0.05)
    fetch = rig.host.fetch(map(identity_of, range(2)))
    assert rig.host.is_pending(fetch)
    wait_until(lambda: not rig.host.is_pending(fetch))
    assert not rig.host.is_pending(fetch)
    assert rig.count("disk_fetch_timeouts") == 1
    assert rig.load(0) == 0
    StuckFile.go.set()
    rig.wait(fetch)  # late, but not in vain
    assert rig.load(0, 1) == 2
    rig.check_slots()


def test_abandoned_reads_are_not_started(stuck_rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = stuck_rig
    StuckFile.go.set()
    rig.evict(*range(20))
    StuckFile.go.clear()
    monkeypatch.setattr(host_module, "FETCH_TIMEOUT_S", 0.02)
    fetches = [rig.host.fetch(map(identity_of, numbers)) for numbers in ([0, 1, 2, 3], [4, 5])]
    wait_until(lambda: not any(map(rig.host.is_pending, fetches)))
    StuckFile.go.set()
    for fetch in fetches:
        rig.wait(fetch)
    assert rig.count("disk_hit_blocks") == 4
    assert rig.in_host(*range(6)) == [0, 1, 2, 3]
    rig.check_slots()


def test_a_damaged_block_is_dropped_counted_and_written_again(make_rig) -> None:
    rig = make_rig()
    rig.evict(*range(10))
    blocks = rig.file.path / "blocks"
    raw = bytearray(blocks.read_bytes())
    raw[5] ^= 1
    blocks.write_bytes(raw)
    rig.fetch(0, 1)
    assert rig.in_host(0, 1) == [1]
    assert rig.on_disk(0, 1) == [1]
    assert (rig.count("disk_corrupt_blocks"), rig.count("disk_hit_blocks")) == (1, 1)
    rig.check_slots()
    rig.evict(0, *range(20, 30))
    rig.fetch(0)
    assert rig.load(0) == 1


def test_a_full_disk_drops_its_oldest_blocks(make_rig) -> None:
    rig = make_rig(host_slots=4, disk_slots=8)
    rig.evict(*range(12))
    assert rig.on_disk(*range(12)) == list(range(4, 12))
    assert rig.count("disk_evicted_blocks") == 4
    rig.fetch(4)
    rig.evict(20, 21, 22)
    assert rig.on_disk(*range(12)) == [4, 8, 9, 10, 11]  # recently used blocks stay
    rig.check_slots()


def test_closing_writes_queued_blocks(stuck_rig: Rig, make_rig) -> None:
    rig = stuck_rig
    for number in range(8):
        rig.memory.pool[0] = content_of(identity_of(number), BLOCK_BYTES)
        rig.host.save([Evicted(identity_of(number), 0)])
    threading.Timer(0.05, StuckFile.go.set).start()
    rig.host.close(), rig.host.close()
    assert not rig.disk.can_write
    assert make_rig().on_disk(*range(8)) == list(range(8))


@pytest.mark.parametrize("seed", seeds(8))
def test_random_traffic_returns_right_content_and_loses_no_slot(make_rig, seed: int) -> None:
    rng = random.Random(seed)
    rig = make_rig(host_slots=rng.randrange(4, 12), disk_slots=rng.randrange(12, 30))
    fetches = []
    for _ in range(400):
        first = rng.randrange(40)
        numbers = range(first, first + rng.randrange(1, 6))
        match rng.randrange(4):
            case 0 | 1:
                for number in numbers:
                    rig.memory.pool[number] = content_of(identity_of(number), BLOCK_BYTES)
                rig.host.save([Evicted(identity_of(number), number) for number in numbers])
            case 2:
                known = filter(rig.host.knows, map(identity_of, numbers))
                fetches.append(rig.host.fetch([*known]))
            case 3:
                rig.host.touch([identity_of(number) for number in numbers])
                rig.load(*numbers)
        if rng.random() < 0.2:
            rig.host.poll()
        if rng.random() < 0.1:
            rig.settle()
        assert rig.host.num_blocks <= rig.host.capacity
    for fetch in fetches:
        rig.wait(fetch)
    rig.settle()
    rig.check_slots()
    assert rig.count("disk_corrupt_blocks") == rig.count("disk_io_errors") == 0
    assert rig.count("disk_hit_blocks") > 0
