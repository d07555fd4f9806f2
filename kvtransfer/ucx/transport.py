"""The `ucx` transport: the receiver reads the sender's blocks with one-sided operations.

The connection is an ordinary TCP one; over it go the handshake, the sender's introduction, pieces and acks.
Reading rather than writing keeps a pool to its own process: a read that is over cannot write any more, and
whether it is over is known here, without a word from a peer that may be dead. Until then the gate of the
lease that it writes under stays entered, so that the blocks are not used for anything else.

As with `shm`, a piece counts only if it could still be acknowledged after it was read: a sender that gives up
on us closes the connection before it reuses the blocks.
"""

from __future__ import annotations

import mmap
import secrets
import socket
from dataclasses import replace
from typing import Literal

import numpy as np

from kvtransfer.channel import Channel
from kvtransfer.device import settle
from kvtransfer.extents import PARTS_AT_ONCE, Blocks
from kvtransfer.interface import RegisteredPool
from kvtransfer.messages import Hello
from kvtransfer.tcp import TcpTransport, _tune
from kvtransfer.transport import Listener
from kvtransfer.ucx.agent import Agent, Memory
from kvtransfer.ucx.limbo import Limbo
from kvtransfer.ucx.messages import Introduction, Welcome
from kvtransfer.ucx.reader import UcxReader
from protocol.errors import ProtocolError

_SCRATCH_BYTES = 4096
_NO_READ = (
    "UCX cannot read from the sender by RDMA, cuda_ipc or cma ({error}); "
    "UCX_PROTO_EMULATION_ENABLE=y allows it over TCP, at the risk of the sender's process"
)


def memory_of(pool: RegisteredPool) -> Memory:
    """Where a pool lies."""
    if pool.device is None:
        return Memory(_address(pool.buffer), pool.block_bytes, pool.num_blocks)
    device = pool.device.device
    kind: Literal["cpu", "cuda"] = "cuda" if device.type == "cuda" else "cpu"
    return Memory(pool.device.data_ptr(), pool.block_bytes, pool.num_blocks, kind, device.index or 0)


def _address(buffer: memoryview | mmap.mmap) -> int:
    return int(np.frombuffer(buffer, dtype=np.uint8).ctypes.data)


class UcxWriter:
    remote_reads = True
    packed = None

    def __init__(self, pool: RegisteredPool) -> None:
        self._pool = pool

    def payload(self, blocks: Blocks, num_tokens: int) -> list[memoryview]:
        settle(self._pool.device)
        return []

    def close(self) -> None:
        return


class UcxTransport:
    """One per process and pool. `name` helps to tell agents apart in NIXL's messages.

    Raises TransferError where NIXL is not installed, OSError where it does not work.
    """

    name = "ucx"
    same_host = False
    streams = 1
    parts_at_once = PARTS_AT_ONCE
    wire_dtype = "auto"
    reaches_devices = True

    def __init__(self, pool: RegisteredPool, name: str) -> None:
        self._pool = pool  # its memory must outlive the agent
        self._tcp = TcpTransport()
        self._agent = Agent(f"{name}-{secrets.token_hex(8)}")
        self._limbo = Limbo(self._agent)
        memory = memory_of(pool)
        try:
            self._agent.register(memory)
            # Nothing else is registered yet: others are to read the pool alone.
            metadata = self._agent.metadata()
            self._introduction = Introduction(
                self._agent.name, metadata, memory.address, memory.kind, memory.device_id
            )
            self._scratch = mmap.mmap(-1, _SCRATCH_BYTES)
            self._scratch_memory = Memory(_address(self._scratch), _SCRATCH_BYTES, 1)
            self._agent.register(self._scratch_memory)
        except BaseException:
            self._agent.close()
            raise

    @property
    def in_limbo(self) -> int:
        """Reads that were given up but may still write."""
        return len(self._limbo)

    def listen(self, host: str) -> tuple[Listener, str]:
        return self._tcp.listen(host)

    def connect(self, address: str) -> socket.socket:
        return self._tcp.connect(address)

    def writer(self, channel: Channel, pool: RegisteredPool, deadline: float) -> UcxWriter:
        if memory_of(pool) != memory_of(self._pool):
            raise OSError("the pool is not the one that this transport was opened for")
        channel.send(self._introduction, deadline)
        refusal = channel.recv(Welcome, deadline).refusal
        if refusal:
            raise OSError(refusal)
        return UcxWriter(pool)

    def reader(
        self,
        channel: Channel,
        target: RegisteredPool,
        hello: Hello,
        deadline: float,
        progress_timeout_s: float,
    ) -> UcxReader:
        """Raises ProtocolError for a sender that describes itself badly, OSError if it can't be read from.

        UCX connects at the first read, so that one is made here. The sender waits for it.
        """
        _tune(channel.socket)
        if hello.block_bytes != target.block_bytes:
            raise ProtocolError(f"block_bytes is {hello.block_bytes}, expected {target.block_bytes}")
        sender = channel.recv(Introduction, deadline)
        source = Memory(sender.address, hello.block_bytes, hello.num_blocks, sender.kind, sender.device_id)
        reader = UcxReader(
            self._agent,
            self._limbo,
            channel,
            sender.agent,
            sender.metadata,
            source,
            target,
            memory_of(target),
            progress_timeout_s,
        )
        start = replace(source, block_bytes=min(_SCRATCH_BYTES, hello.block_bytes), num_blocks=1)
        scratch = replace(self._scratch_memory, block_bytes=start.block_bytes)
        try:
            reader.warm_up(start, scratch, deadline)
            channel.send(Welcome(), deadline)
        except ConnectionError as error:
            reader.close()
            channel.send(Welcome(_NO_READ.format(error=error)[:512]), deadline)
            raise
        except BaseException:
            reader.close()
            raise
        return reader

    def close(self) -> None:
        """After it NIXL holds and does nothing in this process any more. Idempotent."""
        self._limbo.stop()
        self._agent.close()
        self._limbo.release()
