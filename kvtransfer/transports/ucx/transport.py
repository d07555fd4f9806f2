"""The `ucx` transport: the receiver reads the sender's blocks with one-sided operations.

The connection is an ordinary TCP one; over it go the handshake, the sender's introduction, pieces and acks.
Reading rather than writing keeps a pool to its own process: a read that is over cannot write any more, and
whether it is over is known here, without a word from a peer that may be dead. Until then the gate of the
lease that it writes under stays entered, so that the blocks are not used for anything else.

A piece counts only if the sender still stood by its blocks when their read had ended. The receiver reads that
from the sender's memory too (see `words`). That an acknowledgement can be sent says nothing: TCP takes the
first one after the peer has hung up.
"""

from __future__ import annotations

import secrets
import socket
from typing import Literal

import numpy as np

from kvtransfer.blocks.device import settle
from kvtransfer.blocks.extents import PARTS_AT_ONCE, Blocks
from kvtransfer.framing.channel import Channel
from kvtransfer.framing.messages import Hello
from kvtransfer.interface import RegisteredPool
from kvtransfer.transports.sockets import connect_tcp, listen_tcp, tune
from kvtransfer.transports.transport import Listener
from kvtransfer.transports.ucx.agent import Agent, Memory
from kvtransfer.transports.ucx.messages import Introduction, Welcome
from kvtransfer.transports.ucx.orphans import OrphanedReads
from kvtransfer.transports.ucx.reader import UcxReader
from kvtransfer.transports.ucx.words import Word, Words
from protocol.errors import ProtocolError

_NO_READ = (
    "UCX cannot read from the sender by RDMA, cuda_ipc or cma ({error}); "
    "UCX_PROTO_EMULATION_ENABLE=y allows it over TCP, at the risk of the sender's process"
)


def memory_of(pool: RegisteredPool) -> Memory:
    """Where a pool lies."""
    if pool.device is None:
        return Memory(
            int(np.frombuffer(pool.buffer, np.uint8).ctypes.data), pool.block_bytes, pool.num_blocks
        )
    device = pool.device.device
    kind: Literal["cpu", "cuda"] = "cuda" if device.type == "cuda" else "cpu"
    return Memory(pool.device.data_ptr(), pool.block_bytes, pool.num_blocks, kind, device.index or 0)


class UcxWriter:
    remote_reads = True
    packed = None

    def __init__(self, pool: RegisteredPool, word: Word) -> None:
        self._pool = pool
        self._word = word

    def payload(self, blocks: Blocks, num_tokens: int) -> list[memoryview]:
        settle(self._pool.device)
        return []

    def close(self) -> None:
        self._word.release()


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
        self._agent = Agent(f"{name}-{secrets.token_hex(8)}")
        self._orphans = OrphanedReads(self._agent)
        self._words = Words()
        try:
            self._agent.register(memory_of(pool))
            self._agent.register(self._words.memory)
            self._metadata = self._agent.metadata()
        except BaseException:
            self._agent.close()
            raise

    @property
    def num_orphaned_reads(self) -> int:
        """Reads that were given up but may still write."""
        return len(self._orphans)

    def listen(self, host: str) -> tuple[Listener, str]:
        return listen_tcp(host)

    def connect(self, address: str) -> socket.socket:
        return connect_tcp(address)

    def writer(self, channel: Channel, pool: RegisteredPool, deadline: float) -> UcxWriter:
        if memory_of(pool) != memory_of(self._pool):
            raise OSError("the pool is not the one that this transport was opened for")
        word, memory = self._words.take(), memory_of(pool)
        word.write(word.token)
        try:
            channel.send(
                Introduction(
                    agent=self._agent.name,
                    metadata=self._metadata,
                    address=memory.address,
                    kind=memory.kind,
                    device_id=memory.device_id,
                    word_address=word.memory.address,
                    token=word.token,
                ),
                deadline,
            )
            refusal = channel.recv(Welcome, deadline).refusal
            if refusal:
                raise OSError(refusal)
        except BaseException:
            word.release()
            raise
        return UcxWriter(pool, word)

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
        tune(channel.socket)
        if hello.block_bytes != target.block_bytes:
            raise ProtocolError(f"block_bytes is {hello.block_bytes}, expected {target.block_bytes}")
        sender = channel.recv(Introduction, deadline)
        reader = UcxReader(
            self._agent,
            self._orphans,
            channel,
            sender,
            Memory(sender.address, hello.block_bytes, hello.num_blocks, sender.kind, sender.device_id),
            target,
            memory_of(target),
            self._words.take(),
            progress_timeout_s,
        )
        try:
            reader.warm_up(deadline)
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
        self._orphans.stop()
        self._agent.close()
        self._orphans.release()
