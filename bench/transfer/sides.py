"""The two sides of a pair, each in its own process: our transfers, and the raw streams to compare with."""

from __future__ import annotations

import ctypes
import os
import random
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch

from bench.transfer.process import ProcessObject, RemoteObject
from kvtransfer.blocks.extents import address
from kvtransfer.blocks.memory import PoolMemory, map_peer_pool
from kvtransfer.interface import Completed, Failed, RegisteredPool
from kvtransfer.receiver import Receiver
from kvtransfer.sender import Sender
from kvtransfer.transports.registry import TransportOptions, open_transports
from kvtransfer.transports.tcp import TcpTransport
from protocol.handoff import Extent, SegmentInfo
from protocol.ids import PeerAddress

HOST, KEY = "127.0.0.1", bytes(32)
CHUNK_BYTES = 4 * 1024 * 1024


@dataclass(frozen=True)
class TransferResult:
    """The duration and size of one transfer."""

    seconds: float
    nbytes: int
    num_extents: int


class Side:
    def __init__(
        self,
        transports: Sequence[str],
        block_bytes: int,
        num_blocks: int,
        name: str,
        options: TransportOptions = TransportOptions(),
        segments: tuple[SegmentInfo, ...] = (),
    ) -> None:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // 2))  # like one of two workers on a host
        self.name = name
        self.memory = PoolMemory(block_bytes * num_blocks)
        np.frombuffer(self.memory.buffer, dtype=np.uint8).fill(1)  # touches every page
        self.pool = RegisteredPool(self.memory.buffer, block_bytes, num_blocks, segments, self.memory.fd)
        self.address = address(self.memory.buffer)
        self.transports = open_transports(list(transports), self.pool, name, options)
        self.stream = socket.socket()

    def close(self) -> None:
        for transport in self.transports:
            transport.close()
        self.stream.close()

    def cpu_seconds(self) -> float:
        """Return the CPU time that this process has used so far."""
        return time.process_time()


class ReceivingSide(Side):
    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.receiver = Receiver(
            self.pool,
            key=KEY,
            worker_id=self.name,
            incarnation=self.name,
            transports=self.transports,
            host=HOST,
            on_event=lambda: None,
        )
        self._listener, self._raw_address = TcpTransport().listen(HOST)

    def close(self) -> None:
        self.receiver.close()
        self._listener.close()
        super().close()

    def meet(self, pid: int, fd: int) -> tuple[PeerAddress, str]:
        """Map the sender's pool. Return our address, and the address of our raw stream."""
        descriptor = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR)
        self.source = map_peer_pool(descriptor, os.fstat(descriptor).st_size)
        peer = PeerAddress(
            worker_id=self.name, incarnation=self.name, control="-", offers=self.receiver.offers
        )
        return peer, self._raw_address

    def accept(self) -> None:
        self.stream, _ = self._listener.accept()

    def open(self, lease_id: str, blocks: Sequence[int]) -> None:
        self.receiver.open(lease_id, [Extent(0, list(blocks))])

    def close_lease(self, lease_id: str) -> None:
        self.receiver.close_lease(lease_id)

    def memcpy(self) -> float:
        """Return the seconds of one plain copy of the sender's whole pool into ours."""
        started = time.perf_counter()
        ctypes.memmove(self.address, address(memoryview(self.source)), self.pool.nbytes)
        return time.perf_counter() - started

    def receive_stream(self) -> None:
        buffer, received = self.pool.buffer, 0
        while received < self.pool.nbytes:
            received += self.stream.recv_into(buffer[received : received + CHUNK_BYTES])
        self.stream.sendall(b"\0")


class SendingSide(Side):
    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._woken = threading.Event()
        self._senders = {
            transport.name: Sender(
                self.pool,
                key=KEY,
                worker_id=f"{self.name}-{transport.name}",
                incarnation=self.name,
                transports=[transport],
                on_event=self._woken.set,
            )
            for transport in self.transports
        }

    def close(self) -> None:
        for sender in self._senders.values():
            sender.close()
        super().close()

    def fill(self, kv: bytes) -> None:
        """Fill the pool with copies of `kv`."""
        pool = np.frombuffer(self.pool.buffer, np.uint8)
        pool[:] = np.resize(np.frombuffer(kv, np.uint8), len(pool))

    def whereabouts(self) -> tuple[int, int]:
        """Return the id of this process and the descriptor of the pool's file in it."""
        assert self.memory.fd is not None
        return os.getpid(), self.memory.fd

    def meet(self, peer: PeerAddress, raw_address: str) -> None:
        self._peer = peer
        self.stream = TcpTransport().connect(raw_address)
        self.stream.setblocking(True)

    def push(self, transport: str, lease_id: str, blocks: Sequence[int]) -> TransferResult:
        """Push blocks of our pool and wait until all have arrived."""
        sender = self._senders[transport]
        started = time.perf_counter()
        num_tokens = len(blocks) * self.pool.block_size
        sender.push(self._peer, lease_id, [Extent(0, list(blocks))], 0, num_tokens, final=True)
        while True:
            self._woken.wait()
            self._woken.clear()
            for event in sender.poll():
                if isinstance(event, Failed):
                    raise RuntimeError(event.reason)
                if isinstance(event, Completed):
                    return TransferResult(time.perf_counter() - started, event.nbytes, event.num_extents)

    def send_stream(self) -> float:
        """Return the seconds of one `sendall` of the whole pool, up to the receiver's confirmation."""
        started = time.perf_counter()
        self.stream.sendall(self.pool.buffer[: self.pool.nbytes])
        self.stream.recv(1)
        return time.perf_counter() - started


class Pair:
    """Two processes that are connected over all of `transports` and by a raw stream."""

    def __init__(
        self,
        transports: Sequence[str],
        block_bytes: int,
        num_blocks: int,
        receiving: type[ReceivingSide] = ReceivingSide,
        sending: type[SendingSide] = SendingSide,
        start: Callable[..., RemoteObject] = ProcessObject,
    ) -> None:
        self.num_blocks = num_blocks
        self._num_leases = 0
        with ExitStack() as stack:
            self.receiver, self.sender = (
                stack.enter_context(start(side, transports, block_bytes, num_blocks, side.__name__))
                for side in (receiving, sending)
            )
            peer, raw_address = self.receiver.call("meet", *self.sender.call("whereabouts"))
            self.sender.call("meet", peer, raw_address)
            self.receiver.call("accept")
            self._stack = stack.pop_all()

    def close(self) -> None:
        self._stack.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def memcpy(self) -> float:
        return float(self.receiver.call("memcpy"))

    def raw_stream(self) -> float:
        self.receiver.begin("receive_stream")
        seconds = self.sender.call("send_stream")
        self.receiver.end()
        return float(seconds)

    def move(self, transport: str, source: Sequence[int]) -> TransferResult:
        """Push these blocks into the receiver's first blocks."""
        self._num_leases += 1
        lease_id = f"{transport}-{self._num_leases}"
        self.receiver.call("open", lease_id, list(range(len(source))))
        moved: TransferResult = self.sender.call("push", transport, lease_id, list(source))
        self.receiver.call("close_lease", lease_id)
        return moved

    def cpu_seconds(self) -> float:
        """Return the CPU time that both processes have used so far."""
        return sum(float(side.call("cpu_seconds")) for side in (self.sender, self.receiver))


def scattered(num_blocks: int) -> list[int]:
    """Return all blocks of a pool in an order in which few are consecutive."""
    blocks = list(range(num_blocks))
    random.Random(0).shuffle(blocks)
    return blocks
