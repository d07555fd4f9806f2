"""The `ucx` transport: NIXL with its UCX backend, for RDMA, NVLink and other fabrics that UCX supports.

The connection is an ordinary TCP one for the handshake, the sender's introduction, pieces and acks. The
receiver reads, rather than the sender writing, so that only a pool's own process writes to the pool. The
receiver knows when a read is over, even if the peer is dead, and nothing is written afterwards. During the
read it stays inside the lease's write gate, so that the blocks are not used for anything else.

A piece counts only if the sender had not given the connection up when the read ended. The receiver reads this
from the sender's memory, too (see `ConnectionWord`). A sent ack proves nothing: TCP accepts the first one
after the peer has hung up.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Sequence
from pathlib import Path

import torch

from kvtransfer.blocks.extents import PARTS_AT_ONCE
from kvtransfer.interface import RegisteredPool
from kvtransfer.messages import Channel, Hello
from kvtransfer.transports.transport import PieceWriter, Transport, tune
from kvtransfer.transports.ucx_agent import Agent, Memory
from kvtransfer.transports.ucx_reader import (
    WORD_BYTES,
    ConnectionWord,
    Introduction,
    OrphanedReads,
    UcxReader,
    UcxWelcome,
    Words,
)
from protocol.errors import ProtocolError
from protocol.ports import ANY_PORT

_NO_READ = (
    "UCX cannot read from the sender by RDMA, cuda_ipc or cma ({error}); "
    "UCX_PROTO_EMULATION_ENABLE=y allows it over TCP, at the risk of the sender's process"
)


_FABRICS = (Path("/sys/class/infiniband"), Path("/dev/nvidia-caps-imex-channels"))
"""Folders that are not empty if this host has RDMA devices, or NVLink to other hosts."""


def reaches_other_hosts() -> bool:
    """Return whether UCX can read from another host: over a fabric, or over TCP if forced to (`ucx_agent`).

    Otherwise the transport would be tried with each remote peer, and log UCX errors, before it is refused.
    """
    is_forced = os.environ.get("UCX_PROTO_EMULATION_ENABLE", "n").lower() in ("y", "yes", "1", "on", "try")
    return is_forced or any(folder.is_dir() and any(folder.iterdir()) for folder in _FABRICS)


def _device(pool: RegisteredPool) -> torch.device:
    return torch.device("cpu") if pool.device is None else pool.device.device


class UcxWriter(PieceWriter):
    remote_reads = True

    def __init__(self, pool: RegisteredPool, word: ConnectionWord) -> None:
        super().__init__(pool)
        self._word = word

    def close(self) -> None:
        self._word.release()


class UcxTransport(Transport):
    """The `ucx` transport of one process and pool. `name` tells agents apart in NIXL's messages.

    Raises TransferError if NIXL is not installed, OSError if it does not work.
    """

    name = "ucx"
    same_host = not reaches_other_hosts()
    parts_at_once = PARTS_AT_ONCE
    reaches_devices = True

    def __init__(self, pool: RegisteredPool, name: str, ports: Sequence[int] = ANY_PORT) -> None:
        self._pool = pool  # the pool's memory must outlive the agent
        self._agent = Agent(f"{name}-{secrets.token_hex(8)}", on_this_host=self.same_host, ports=ports)
        self._orphans = OrphanedReads(self._agent)
        self._words = Words()
        self._probed = torch.zeros((1, WORD_BYTES), dtype=torch.uint8, device=_device(pool))
        try:
            self._agent.register(Memory.of(pool))
            self._agent.register(self._words.memory)
            self._agent.register(Memory.of_blocks(self._probed))
            self._metadata = self._agent.metadata()
        except BaseException:
            self._agent.close()
            raise

    def writer(self, channel: Channel, pool: RegisteredPool, deadline: float) -> UcxWriter:
        memory = Memory.of(pool)
        if memory != Memory.of(self._pool):
            raise OSError("the pool is not the one that this transport was opened for")
        word = self._words.take()
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
            refusal = channel.recv(UcxWelcome, deadline).refusal
            if refusal:
                raise OSError(refusal)
        except BaseException:
            word.release()
            raise
        return UcxWriter(pool, word)

    def reader(self, channel: Channel, target: RegisteredPool, hello: Hello, deadline: float) -> UcxReader:
        """Return the receiver's end. Raises ProtocolError for a bad introduction, OSError for an unreadable
        pool.

        UCX connects at the first read, so one is made here. The sender waits for it.
        """
        tune(channel.socket)
        if hello.block_bytes != target.block_bytes:
            raise ProtocolError(f"block_bytes is {hello.block_bytes}, expected {target.block_bytes}")
        sender = channel.recv(Introduction, deadline)
        source = Memory(sender.address, hello.block_bytes, hello.num_blocks, sender.kind, sender.device_id)
        word = self._words.take()
        probe = word.memory if target.device is None else Memory.of_blocks(self._probed)
        reader = UcxReader(self._agent, self._orphans, channel, sender, source, target, word, probe)
        try:
            reader.warm_up(deadline)
            channel.send(UcxWelcome(), deadline)
        except ConnectionError as error:
            reader.close()
            channel.send(UcxWelcome(_NO_READ.format(error=error)[:512]), deadline)
            raise
        except BaseException:
            reader.close()
            raise
        return reader

    def close(self) -> None:
        """Release NIXL's resources and end its threads in this process. Idempotent."""
        self._orphans.stop()
        self._agent.close()
        self._orphans.release()
