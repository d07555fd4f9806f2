"""The `cuda_ipc` transport: the receiver maps the sender's pool, on a GPU of its host, and copies the blocks.

As with `shm`, the connection is an abstract Unix socket, and a piece counts only if its ack could be sent
after the copy: a sender closes the connection before it reuses the blocks. The copy needs no help of the
sender's process, so a frozen one does not hold it up.

A mapping lasts as long as some connection reads from it. The sender's pool is freed only with its process,
and CUDA leaves undefined what is read afterwards. Linux frees a process's own memory before it closes its
files, among them the GPU's and the connection. So a copy counts only if the process still had memory then.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np
from msgspec import Meta
from torch import Tensor

from kvtransfer.blocks.extents import PARTS_AT_ONCE, BlockIndices, address, runs
from kvtransfer.interface import RegisteredPool, TransferError
from kvtransfer.lease import WriteGate
from kvtransfer.messages import Channel, Hello, Reason
from kvtransfer.transports.cuda_driver import HANDLE_BYTES, Driver, Mappings
from kvtransfer.transports.transport import LocalTransport, PieceReader, PieceWriter
from native.ownership import peer_of
from protocol.errors import ProtocolError

_PROBED_BYTES = 4096


class Export(msgspec.Struct, frozen=True, tag="cuda-ipc"):
    """Sender to receiver: the handle of the allocation with its pool, and the pool's place in it.

    A handle is for processes of one PID namespace: in another it may name another process's memory.
    """

    handle: Annotated[bytes, Meta(min_length=HANDLE_BYTES, max_length=HANDLE_BYTES)]
    offset: Annotated[int, Meta(ge=0, lt=2**62)]
    pid_namespace: Annotated[int, Meta(ge=0, lt=2**62)]


class CudaIpcWelcome(msgspec.Struct, frozen=True, tag="cuda-ipc-welcome"):
    """Receiver to sender: reading from the pool works, or fails (`refusal`)."""

    refusal: Reason = ""


class CudaIpcWriter(PieceWriter):
    remote_reads = True


class CudaIpcReader(PieceReader):
    """A reader of blocks from `source`, the sender's pool as it is mapped here, for one thread."""

    def __init__(
        self,
        driver: Driver,
        mappings: Mappings,
        export: Export,
        sender: int,
        pool: RegisteredPool,
        target: RegisteredPool,
    ) -> None:
        """`sender` is its process; `target` our `pool`, or host memory in which its blocks are converted."""
        self._sender = sender
        self._driver, self._mappings, self._handle = driver, mappings, export.handle
        self._copies, self._block_bytes = pool.queue.copies(), target.block_bytes
        self._target = address(target.buffer) if target.device is None else _blocks(target).data_ptr()
        self._allocation = mappings.open(export.handle)
        self._source = self._allocation.address + export.offset

    def check(self, hello: Hello, offset: int, scratch: Tensor) -> None:
        """Read into `scratch`, on our GPU. Raises ProtocolError if the sender's blocks are not all in its
        allocation, OSError if they can't be read.
        """
        end = offset + hello.num_blocks * hello.block_bytes
        if end > self._allocation.nbytes:
            raise ProtocolError(f"the pool ends at byte {end} of an allocation of {self._allocation.nbytes}")
        with self._copies.within():
            self._driver.copy([(scratch.data_ptr(), self._source, scratch.nbytes)], self._copies.stream)

    def read(self, sources: BlockIndices, targets: BlockIndices, gate: WriteGate) -> bool:
        with gate.writing() as is_open:
            if is_open and len(sources):
                with self._copies.within():
                    self._driver.copy(self._runs(sources, targets), self._copies.stream)
        if not has_memory(self._sender):
            raise ConnectionResetError("the sender ended during a read")
        return is_open

    def close(self) -> None:
        self._mappings.close(self._handle)

    def _runs(self, sources: BlockIndices, targets: BlockIndices) -> Iterator[tuple[int, int, int]]:
        """Yield target, source and length of blocks that are consecutive on both sides."""
        nbytes = self._block_bytes
        for source, target, length in runs(np.stack((sources, targets))).tolist():
            yield self._target + target * nbytes, self._source + source * nbytes, length * nbytes


class CudaIpcTransport(LocalTransport):
    """The `cuda_ipc` transport of one process and pool. Raises TransferError if other processes can't map the
    pool, OSError without CUDA's driver.
    """

    name = "cuda_ipc"
    parts_at_once = PARTS_AT_ONCE
    reaches_devices = True

    def __init__(self, pool: RegisteredPool) -> None:
        self._pool, blocks = pool, _blocks(pool)  # the transport keeps the exported memory
        self._driver = Driver(blocks.device)
        self._mappings = Mappings(self._driver)
        start = self._driver.allocation(blocks.data_ptr()).address
        try:
            handle = self._driver.export(start)
        except OSError as error:
            raise TransferError(
                f"other processes can't map the pool, as with expandable_segments ({error})"
            ) from error
        self._export = Export(handle, blocks.data_ptr() - start, _pid_namespace())
        self._scratch = blocks.new_empty(min(_PROBED_BYTES, blocks.shape[1]))

    def writer(self, channel: Channel, pool: RegisteredPool, deadline: float) -> CudaIpcWriter:
        if pool is not self._pool:
            raise OSError("the pool is not the one that this transport was opened for")
        channel.send(self._export, deadline)
        refusal = channel.recv(CudaIpcWelcome, deadline).refusal
        if refusal:
            raise OSError(refusal)
        return CudaIpcWriter(pool)

    def reader(
        self, channel: Channel, target: RegisteredPool, hello: Hello, deadline: float
    ) -> CudaIpcReader:
        """Return the receiver's end. Raises ProtocolError for a bad export, OSError for an unreadable pool.
        The sender is told why.
        """
        export = channel.recv(Export, deadline)
        try:
            reader = self._opened(export, peer_of(channel.socket).pid, target, hello)
        except (OSError, ProtocolError) as error:
            channel.send(CudaIpcWelcome(str(error)[:512]), deadline)
            raise
        try:
            channel.send(CudaIpcWelcome(), deadline)
        except BaseException:
            reader.close()
            raise
        return reader

    def _opened(self, export: Export, sender: int, target: RegisteredPool, hello: Hello) -> CudaIpcReader:
        if hello.block_bytes != target.block_bytes:
            raise ProtocolError(f"block_bytes is {hello.block_bytes}, expected {target.block_bytes}")
        if export.pid_namespace != _pid_namespace():
            raise OSError("the sender is in another PID namespace, whose memory CUDA does not map")
        reader = CudaIpcReader(self._driver, self._mappings, export, sender, self._pool, target)
        try:
            reader.check(hello, export.offset, self._scratch[: hello.block_bytes])
        except BaseException:
            reader.close()
            raise
        return reader


def _blocks(pool: RegisteredPool) -> Tensor:
    assert isinstance(pool.device, Tensor)
    return pool.device


def has_memory(process: int) -> bool:
    """Return whether a process of this PID namespace has not begun to end."""
    try:
        return Path(f"/proc/{process}/statm").read_bytes().split()[0] != b"0"
    except (FileNotFoundError, ProcessLookupError):
        return False


def _pid_namespace() -> int:
    return os.stat("/proc/self/ns/pid").st_ino
