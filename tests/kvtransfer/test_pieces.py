"""The parts of a copy: queues of pieces, copies of blocks, a pool's memory, abandoned reads."""

from __future__ import annotations

import contextlib
import gc
import mmap
import os
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtransfer.blocks.extents import NO_BLOCKS, Blocks
from kvtransfer.blocks.memory import PoolMemory, map_peer_pool
from kvtransfer.lease import PieceArrival, arrival_of
from kvtransfer.messages import Piece
from kvtransfer.streams.pieces import PieceQueue, QueuedPiece, TransferTime
from kvtransfer.transports import shm
from kvtransfer.transports.shm import Gather
from kvtransfer.transports.ucx_agent import Remote, Transfer
from kvtransfer.transports.ucx_reader import OrphanedReads
from tests.waiting import wait_until


def piece(lease: str, index: int, sent_at: float = 0.0) -> QueuedPiece:
    return QueuedPiece(lease, index, [NO_BLOCKS], 0, False, sent_at=sent_at)


def drain(queue: PieceQueue) -> list[tuple[str, int]]:
    order = []
    while queue:
        taken = queue.take(1)
        assert taken is not None
        order.append((taken.lease_id, taken.index))
    return order


def test_leases_take_turns() -> None:
    queue = PieceQueue()
    for lease, index in [("a", 0), ("a", 1), ("a", 2), ("b", 0)]:
        queue.put(piece(lease, index))
    assert drain(queue) == [("a", 0), ("b", 0), ("a", 1), ("a", 2)]
    assert queue.take(1) is None


def test_a_connection_gets_as_many_parts_as_it_takes_at_once() -> None:
    """Parts are single again after a larger piece has come back from a connection that takes several."""
    parts = list(np.arange(10).reshape(2, 5, 1).swapaxes(0, 1))
    queue = PieceQueue()
    queue.put(QueuedPiece("a", 3, parts, 0, True))
    queue.put(piece("b", 0))
    first = queue.take(3)
    assert first is not None
    assert (first.index, first.final, first.blocks.tolist()) == (3, False, [[0, 1, 2], [5, 6, 7]])
    assert drain(queue) == [("b", 0), ("a", 6), ("a", 7)]
    queue.put_back([first])
    assert drain(queue) == [("a", 3), ("a", 4), ("a", 5)]


def test_only_the_last_part_is_final() -> None:
    first, last = QueuedPiece("a", 0, [NO_BLOCKS] * 3, 0, True).split(2)
    assert (first.final, len(first.parts), last.final, last.index) == (False, 2, True, 2)


def test_returned_pieces_come_first_in_their_order() -> None:
    queue = PieceQueue()
    for index in range(4):
        queue.put(piece("a", index))
    taken = [queue.take(1), queue.take(1)]
    queue.put_back([each for each in taken if each is not None])
    assert drain(queue) == [("a", 0), ("a", 1), ("a", 2), ("a", 3)]


def test_a_dropped_lease_leaves_the_queue() -> None:
    queue = PieceQueue()
    queue.put(piece("a", 0))
    queue.put(piece("b", 0))
    queue.drop("a")
    queue.drop("nobody")
    assert drain(queue) == [("b", 0)]


def test_overlapping_pieces_count_once_and_only_time_before_the_end_is_hidden() -> None:
    time = TransferTime(started=10.0)
    for sent, acknowledged in ((10.0, 12.0), (11.0, 13.0), (20.0, 21.0), (20.2, 20.4)):
        time.add(piece("a", 0, sent_at=sent), acknowledged)
    assert time.busy_s() == pytest.approx(4.0)
    assert time.busy_s(until=12.5) == pytest.approx(2.5)
    assert time.busy_s(until=9.0) == 0.0


def test_an_arrivals_times_need_no_common_clock() -> None:
    """The last piece was pushed two seconds after the first, and each waited before it was sent."""
    now = time.monotonic()
    last = Piece(9, "lease", 1, 1, b"", final=True, pushed_s=2.0, waited_s=0.1)
    first = Piece(8, "lease", 0, 1, b"", final=False, pushed_s=0.0, waited_s=0.5)
    of_last = PieceArrival("tcp", "", 100, announced=now - 0.1)
    arrival = arrival_of([(last, of_last), (first, PieceArrival("tcp", "int8", 300, announced=now - 2.0))])
    assert (arrival.transport, arrival.nbytes) == ("tcp", 400)
    assert arrival.seconds == pytest.approx(2.5, abs=0.1)
    assert arrival.exposed_s == pytest.approx(0.5, abs=0.1)
    assert arrival.wait_s == pytest.approx(0.6)
    assert arrival.foreign_formats == {"int8"}
    assert now <= arrival.at <= time.monotonic()


BLOCK_SIZES = (1, 60, 4096, 16 * 1024 + 4, 100_000)
NUM_BLOCKS = 24


@st.composite
def permuted_blocks(draw: st.DrawFn) -> Blocks:
    source = draw(st.lists(st.integers(0, NUM_BLOCKS - 1), max_size=NUM_BLOCKS))
    target = draw(st.permutations(range(NUM_BLOCKS)))
    if draw(st.booleans()):
        source, target = sorted(source), sorted(target)
    return np.array(list(zip(source, target, strict=False)), dtype=np.int64).reshape(-1, 2).T


@pytest.fixture(params=["compiled", "compiled, past the caches", "block by block"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Select the code path, whatever the blocks' size."""
    if request.param == "block by block":
        monkeypatch.setattr(shm, "compiled", lambda: None)
    else:
        assert shm.compiled() is not None
        monkeypatch.setattr(shm, "GIL_FREE_BYTES", 0)
        past_caches = "past" in request.param
        monkeypatch.setattr(shm, "PAST_CACHES_BYTES", 0 if past_caches else 2**62)
    return str(request.param)


@pytest.mark.parametrize("block_bytes", BLOCK_SIZES)
def test_exactly_the_range_is_copied(way: str, block_bytes: int) -> None:
    rng = np.random.default_rng(0)
    source = rng.integers(0, 256, NUM_BLOCKS * block_bytes + 1, dtype=np.uint8)[1:]

    @settings(deadline=None, max_examples=20)
    @given(permuted_blocks(), st.floats(0, 1), st.floats(0, 1))
    def check(blocks: Blocks, first: float, last: float) -> None:
        sources, targets = blocks
        total = len(sources) * block_bytes
        begin, end = sorted((int(first * total), int(last * total)))
        target = np.zeros(NUM_BLOCKS * block_bytes, dtype=np.uint8)
        expected = target.copy().reshape(NUM_BLOCKS, block_bytes)
        copied = source.reshape(NUM_BLOCKS, block_bytes)[sources].ravel()
        copied[:begin] = 0
        copied[end:] = 0
        expected[targets] = copied.reshape(-1, block_bytes)
        Gather(source.data, target.data, block_bytes).copy(sources, targets, begin, end)
        assert (target == expected.ravel()).all()

    check()


def test_nothing_to_copy(way: str) -> None:
    target = np.zeros(8, dtype=np.uint8)
    none = NO_BLOCKS[0]
    Gather(np.ones(8, dtype=np.uint8).data, target.data, 4).copy(none, none, 0, 0)
    assert not target.any()


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
@pytest.mark.parametrize(("shared", "kind"), [(False, "AnonHugePages"), (True, "ShmemPmdMapped")])
def test_huge_pages_stay_ahead_of_use(shared: bool, kind: str) -> None:
    """Written bytes stay; memory far beyond the used part is not allocated."""
    memory = PoolMemory(64 * MIB, shared=shared)
    content = np.random.default_rng(0).integers(0, 256, 6 * MIB, dtype=np.uint8)
    values = np.frombuffer(memory.buffer, dtype=np.uint8)

    def resident(kind: str = "Rss") -> int:  # the mapping of private memory may be part of a larger one
        return int(details(memory.buffer)[kind][0]) * 1024

    before, huge_before = resident(), resident(kind)
    values[: 6 * MIB] = content
    used = [0]
    memory.stay_ahead(lambda: used[0])
    wait_until(lambda: resident() - before >= 16 * MIB)
    used[0] = 6 * MIB
    wait_until(lambda: resident() - before >= 22 * MIB and resident(kind) - huge_before >= 20 * MIB)
    assert np.array_equal(values[: 6 * MIB], content)
    assert not values[6 * MIB : 22 * MIB].any()
    assert resident() - before < 26 * MIB


@pytest.mark.parametrize(("shared", "advice"), [(False, "_MADV_POPULATE_WRITE"), (True, "_MADV_COLLAPSE")])
def test_a_kernel_without_the_advice_is_reported(
    shared: bool, advice: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(f"kvtransfer.blocks.memory.{advice}", -1)
    memory = PoolMemory(NBYTES, shared=shared)
    memory.stay_ahead(lambda: 1)
    wait_until(lambda: caplog.messages)
    assert "first used" in caplog.messages[0]


def read() -> Transfer:
    return Transfer(0, Remote("sender", b""))


def raising(error: Exception) -> Any:
    def call(*arguments: object) -> Any:
        raise error

    return call


def test_errors_of_one_read_do_not_affect_others() -> None:
    over: set[Transfer] = set()
    failing, unreleasable, good = read(), read(), read()

    def poll(transfer: Transfer) -> bool:
        if transfer is failing and transfer in over:
            transfer.is_over = True
            raise OSError("NIXL: no such peer")
        return transfer in over

    agent: Any = SimpleNamespace(poll=poll)
    orphans = OrphanedReads(agent)
    released: list[str] = []
    for transfer, name in ((failing, "failing"), (unreleasable, "unreleasable"), (good, "good")):
        held = ExitStack()
        held.callback(released.append, name)
        if transfer is unreleasable:
            held.callback(raising(OSError("NIXL: cannot release a list of blocks")))
        orphans.add(transfer, held)
    over.add(unreleasable)
    wait_until(lambda: released == ["unreleasable"])
    over |= {failing, good}
    wait_until(lambda: sorted(released) == ["failing", "good", "unreleasable"])
    wait_until(lambda: not any(thread.name == "kv-ucx-orphan" for thread in threading.enumerate()))
    orphans.add(good, ExitStack())
    wait_until(lambda: not len(orphans))
    orphans.stop()
