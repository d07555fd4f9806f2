"""The cuda_ipc transport over a stand-in for CUDA's driver, whose devices are the host's memory."""

from __future__ import annotations

import ctypes
import logging
import mmap
import multiprocessing
import os
import socket
import subprocess
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from kvtransfer.blocks.layout import block_bytes
from kvtransfer.interface import Closed, Completed, Failed, Progress, RegisteredPool, TransferError
from kvtransfer.transports import cuda_driver, cuda_ipc
from kvtransfer.transports.cuda_driver import Driver
from kvtransfer.transports.registry import TransportOptions, open_transports
from native.ownership import peer_of
from protocol.ids import PeerAddress
from tests.kvtransfer.ordered_device import SEGMENT
from tests.kvtransfer.transfer_sides import WAIT_S, ReceiverEnd, SenderEnd, cut, make_pool, moved
from tests.waiting import wait_until

pytestmark = pytest.mark.usefixtures("fake_cuda")
Closing = Callable[[Any], Any]
NUM_BLOCKS, BLOCK_BYTES, OFFSET = 32, block_bytes([SEGMENT]), 512


def gpu_pool(seed: int) -> RegisteredPool:
    """Return a pool that begins within an allocation, as torch's do."""
    memory = mmap.mmap(-1, OFFSET + NUM_BLOCKS * BLOCK_BYTES)
    blocks = torch.frombuffer(memory, dtype=torch.uint8, offset=OFFSET).view(NUM_BLOCKS, BLOCK_BYTES)
    blocks.view(torch.float32).normal_(generator=torch.Generator().manual_seed(seed))
    return RegisteredPool(memoryview(bytearray()), BLOCK_BYTES, NUM_BLOCKS, (SEGMENT,), device=blocks)


def blocks_of(end: SenderEnd | ReceiverEnd) -> Tensor:
    assert isinstance(end.pool.device, Tensor)
    return end.pool.device


def pair(
    closing: Closing, transports: Iterable[str] = ("cuda_ipc",), **sending: Any
) -> tuple[SenderEnd, ReceiverEnd]:
    sender = closing(SenderEnd([*transports], gpu_pool(1), **sending))
    return sender, closing(ReceiverEnd([*transports], gpu_pool(2)))


def mappings(library: Path) -> int:
    count: int = ctypes.CDLL(str(library)).fake_cuda_mappings()
    return count


def reason(sender: SenderEnd, transport: str = "cuda_ipc") -> str:
    """Return why a transport does not serve the peer."""
    states = sender.sender.pairs.snapshot({})
    return next(state.reason for state in states if state.peer and state.transport == transport)


class HeldCopies:
    """Copies that wait until they are let go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun, self._free, self._copy = threading.Event(), threading.Event(), Driver.copy
        self.hold = False
        monkeypatch.setattr(Driver, "copy", lambda *given: self._run(*given))

    def _run(self, driver: Driver, runs: Iterable[tuple[int, int, int]], stream: int) -> None:
        if self.hold:
            self.begun.set()
            assert self._free.wait(WAIT_S)
        self._copy(driver, runs, stream)

    def hold_one(self, sender: SenderEnd, receiver: ReceiverEnd) -> None:
        """Connect by a first lease, then hold the copy of block 1 for a second one, "lease"."""
        receiver.open("first", [0])
        sender.push(receiver.peer, "first", [0])
        receiver.wait_lease("first")
        self.hold = True
        receiver.open("lease", [1])
        sender.push(receiver.peer, "lease", [1])
        assert self.begun.wait(WAIT_S)

    def let_go(self) -> None:
        self._free.set()


def test_blocks_arrive_and_the_mapping_goes_with_the_connection(closing: Closing, fake_cuda: Path) -> None:
    before = mappings(fake_cuda)
    sender, receiver = pair(closing)
    source, target = blocks_of(sender), blocks_of(receiver)
    untouched = target.clone()
    theirs, ours = [3, 4, 5, 9, 20, 21, 0], [7, 8, 30, 31, 2, 1, 15]
    receiver.open("one", ours)
    sender.push(receiver.peer, "one", theirs)
    assert isinstance(sender.wait_lease("one"), Completed)
    receiver.wait_lease("one")
    assert torch.equal(target[ours], source[theirs])
    others = [block for block in range(NUM_BLOCKS) if block not in ours]
    assert torch.equal(target[others], untouched[others])
    assert moved(sender.sender.pairs, "cuda_ipc") == len(ours) * BLOCK_BYTES
    assert mappings(fake_cuda) == before + 1
    cut(sender)  # the next connection maps the same allocation
    receiver.open("two", [0])
    sender.push(receiver.peer, "two", [1])
    assert isinstance(sender.wait_lease("two"), Completed)
    wait_until(lambda: mappings(fake_cuda) == before + 1)
    sender.close()
    wait_until(lambda: mappings(fake_cuda) == before)


def test_a_host_without_nixl_prefers_it_to_tcp(closing: Closing) -> None:
    sender, receiver = pair(closing, ["cuda_ipc", "tcp"])
    assert [offer.transport for offer in receiver.receiver.offers] == ["cuda_ipc", "tcp"]
    receiver.open("lease", [0])
    sender.push(receiver.peer, "lease", [1])
    assert isinstance(event := sender.wait_lease("lease"), Completed) and event.transport == "cuda_ipc"


def test_a_peer_without_it_gets_blocks_by_tcp(closing: Closing) -> None:
    """An older one, or one on a CPU."""
    sender = closing(SenderEnd(["cuda_ipc", "tcp"], gpu_pool(1)))
    receiver = closing(ReceiverEnd(["tcp"], gpu_pool(2)))
    receiver.open("lease", [0])
    sender.push(receiver.peer, "lease", [1])
    assert isinstance(event := sender.wait_lease("lease"), Completed) and event.transport == "tcp"
    assert reason(sender) == "not offered"


def test_pools_in_the_hosts_memory_leave_it_out(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        wires = open_transports(["shm", "cuda_ipc", "tcp"], make_pool(), "host")
    assert [wire.name for wire in wires] == ["shm", "tcp"] and not caplog.records
    with pytest.raises(TransferError, match="cuda_ipc: the pool is in the host's memory"):
        open_transports(["cuda_ipc"], make_pool(), "host")


def test_memory_that_cannot_be_exported_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_CUDA_EXPANDABLE", "1")
    with pytest.raises(
        TransferError, match=r"as with expandable_segments \(cuIpcGetMemHandle: CUDA_ERROR_INVALID_VALUE\)"
    ):
        open_transports(["cuda_ipc"], gpu_pool(1), "gpu")


def test_without_a_driver_it_is_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_driver, "LIBRARY", "libcuda-of-no-host.so.1")
    with pytest.raises(TransferError, match="cuda_ipc: libcuda-of-no-host"):
        open_transports(["cuda_ipc"], gpu_pool(1), "gpu")


def test_checksums_are_made_on_the_host() -> None:
    with pytest.raises(TransferError, match=r"cuda_ipc: .* checksums are made on the host"):
        open_transports(["cuda_ipc"], gpu_pool(1), "gpu", TransportOptions(checksum="sampled"))


def alter_export(sender: SenderEnd, changes: dict[str, Any]) -> None:
    (transport,) = (wire for wire in sender.wires if wire.name == "cuda_ipc")
    assert isinstance(transport, cuda_ipc.CudaIpcTransport)
    transport._export = msgspec.structs.replace(transport._export, **changes)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"pid_namespace": 1}, "another PID namespace"),
        ({"offset": 1 << 40}, "the pool ends at byte 1099511758848 of an allocation of"),
        ({"handle": bytes(64)}, "cuIpcOpenMemHandle_v2: CUDA_ERROR_INVALID_VALUE"),
    ],
    ids=["container", "too small", "no handle"],
)
def test_a_pool_that_cannot_be_mapped_falls_back(
    closing: Closing, changes: dict[str, Any], why: str, fake_cuda: Path
) -> None:
    before = mappings(fake_cuda)
    sender, receiver = pair(closing, ["cuda_ipc", "tcp"])
    alter_export(sender, changes)
    receiver.open("lease", [0])
    sender.push(receiver.peer, "lease", [1])
    assert isinstance(event := sender.wait_lease("lease"), Completed) and event.transport == "tcp"
    assert why in reason(sender)
    assert mappings(fake_cuda) == before


def test_a_lease_that_ends_during_a_copy_waits_for_it(
    closing: Closing, monkeypatch: pytest.MonkeyPatch
) -> None:
    copies = HeldCopies(monkeypatch)
    sender, receiver = pair(closing)
    copies.hold_one(sender, receiver)
    assert not receiver.receiver.close_lease("lease")
    copies.let_go()
    assert Closed("lease") in receiver.wait_for(lambda event: isinstance(event, Closed))


def test_blocks_that_were_given_up_during_their_copy_never_count(
    closing: Closing, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sender reuses them at once."""
    copies = HeldCopies(monkeypatch)
    sender, receiver = pair(closing, abort_timeout_s=0.1)
    copies.hold_one(sender, receiver)
    sender.sender.abort("lease")
    blocks_of(sender)[1] = 0
    copies.let_go()
    copies.hold = False
    receiver.open("next", [2])
    sender.push(receiver.peer, "next", [2])
    events = receiver.wait_for()
    assert [event.lease_id for event in events if isinstance(event, Progress)] == ["next"]


def test_a_copy_from_a_sender_that_has_begun_to_end_never_counts(
    closing: Closing, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its connection is still open, and another one copies the blocks again."""
    has_memory, copies, copy = iter([False, True]), [], Driver.copy
    monkeypatch.setattr(cuda_ipc, "has_memory", lambda process: next(has_memory))
    monkeypatch.setattr(Driver, "copy", lambda *given: (copies.append(given), copy(*given)))
    sender, receiver = pair(closing)
    receiver.open("lease", [1])
    sender.push(receiver.peer, "lease", [1])
    assert isinstance(sender.wait_lease("lease"), Completed)
    assert len(copies) == 4  # each connection begins with a probe


def test_a_process_that_ends_has_no_memory() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX)
    with ours, theirs:
        assert peer_of(ours) == (os.getpid(), os.getuid())
    with subprocess.Popen(["sleep", "60"]) as process:
        assert cuda_ipc.has_memory(process.pid)
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # it is dead, but not gone
        assert not cuda_ipc.has_memory(process.pid)
    assert not cuda_ipc.has_memory(process.pid)


def send_and_wait(pipe: Connection, library: str, peer: PeerAddress, lease_id: str) -> None:
    """Push half of a lease's blocks from a process of its own, and the rest when told."""
    cuda_driver.LIBRARY = library
    sender = SenderEnd(["cuda_ipc"], gpu_pool(3), worker_id="prefill-1")
    sender.push(peer, lease_id, [0, 1], final=False)
    sender.wait_for(lambda event: event.blocks == 2)
    pipe.send(blocks_of(sender)[:4].numpy())
    pipe.recv()
    sender.push(peer, lease_id, [2, 3], first=2)
    sender.wait_lease(lease_id)
    pipe.send(None)
    sender.close()


@contextmanager
def sending(library: Path, receiver: ReceiverEnd, lease_id: str) -> Iterator[tuple[Any, Connection]]:
    processes = multiprocessing.get_context("spawn")
    ours, theirs = processes.Pipe()
    process = processes.Process(
        target=send_and_wait, args=(theirs, str(library), receiver.peer, lease_id), daemon=True
    )
    process.start()
    theirs.close()
    yield process, ours
    process.join(WAIT_S)
    ours.close()


def answer(pipe: Connection) -> Any:
    assert pipe.poll(60), "the sender does not answer"
    return pipe.recv()


def test_a_dead_senders_lease_fails_and_its_successor_sends(closing: Closing, fake_cuda: Path) -> None:
    before = mappings(fake_cuda)
    receiver = closing(ReceiverEnd(["cuda_ipc"], gpu_pool(2), reconnect_grace_s=0.2))
    receiver.open("lost", [0, 1, 2, 3])
    with sending(fake_cuda, receiver, "lost") as (process, pipe):
        answer(pipe)
        process.kill()
        assert isinstance(failed := receiver.wait_lease("lost"), Failed)
    assert failed.reason == "the sender is gone"
    wait_until(lambda: mappings(fake_cuda) == before)
    receiver.open("next", [4, 5, 6, 7])
    with sending(fake_cuda, receiver, "next") as (process, pipe):
        sent = answer(pipe)
        pipe.send(None)
        receiver.wait_lease("next")
        answer(pipe)
    assert torch.equal(blocks_of(receiver)[4:8], torch.from_numpy(sent))
    wait_until(lambda: mappings(fake_cuda) == before)
