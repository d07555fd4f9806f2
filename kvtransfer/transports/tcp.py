"""The `tcp` transport: blocks follow their piece's message, sent from one pool and received into the
other.
"""

from __future__ import annotations

import select
import socket

import numpy as np
import torch

from kvtransfer.blocks.convert import Quantizer
from kvtransfer.blocks.device import Arriving, BlockGatherer, pinned
from kvtransfer.blocks.extents import BlockIndices, Blocks, Buffers, ScatterList, blocks_per_part, views
from kvtransfer.blocks.layout import tokens_in_blocks
from kvtransfer.channel import Channel
from kvtransfer.interface import RegisteredPool
from kvtransfer.lease import WriteGate
from kvtransfer.messages import GOOD, SPOILED, Hello
from kvtransfer.transports.transport import PieceReader, PieceWriter, Transport, tune
from protocol.errors import ProtocolError

_HOST_SEND_BYTES = 512 * 1024
_HOST_WINDOW_BYTES = 1024 * 1024
_DISCARDED = memoryview(bytearray(1024 * 1024))


def _bound_buffers(sock: socket.socket) -> None:
    """Within one host, keep the socket's buffers small enough for a cache.

    There the kernel would let them grow to tens of megabytes, although there is no network delay to cover.
    Between hosts the kernel's own sizes are used: they grow as far as the path needs.
    """
    if sock.getpeername()[0] != sock.getsockname()[0]:
        return
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _HOST_SEND_BYTES)
    if hasattr(socket, "TCP_WINDOW_CLAMP"):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_WINDOW_CLAMP, _HOST_WINDOW_BYTES)


class StagingWriter(PieceWriter):
    """Copies each piece from a device's memory to the host, and sends what has arrived while the rest is
    copied.
    """

    def __init__(self, pool: RegisteredPool) -> None:
        super().__init__(pool)
        assert pool.device is not None
        self._gatherer = BlockGatherer(pool.device, pool.queue, blocks_per_part(pool.block_bytes))
        self._arriving = Arriving(self._gatherer.buffer, [], [])

    def source(self, blocks: Blocks, num_tokens: int) -> tuple[memoryview, BlockIndices]:
        self._arriving = self._gatherer.gather(blocks[0])
        return self._gatherer.buffer, np.arange(blocks.shape[1])

    def wait_arrived(self) -> None:
        self._arriving[:]

    def payload(self, buffer: memoryview, indices: BlockIndices) -> Buffers:
        return [self._arriving, memoryview(GOOD)]


class QuantizingWriter(PieceWriter):
    """Packs each piece as one byte a value and some scales, on the pool's device."""

    def __init__(self, pool: RegisteredPool, wire_dtype: str) -> None:
        self._values = pool.buffer if pool.device is None else pool.device
        device = torch.device("cpu") if pool.device is None else pool.device.device
        self._quantizer = Quantizer(pool.segments, wire_dtype, device)
        super().__init__(pool, self._quantizer.wire_block_bytes)
        max_blocks = blocks_per_part(pool.block_bytes)
        self._packed = pinned(max_blocks * self.block_bytes, device)
        self._host = torch.frombuffer(self._packed, dtype=torch.uint8).view(max_blocks, self.block_bytes)
        self._codes = self._host.to(device)
        self._copies = pool.queue.copies()

    def source(self, blocks: Blocks, num_tokens: int) -> tuple[memoryview, BlockIndices]:
        valid = tokens_in_blocks(blocks[1], self._pool.block_size, num_tokens)
        with self._copies.within():
            self._quantizer.pack(self._values, blocks[0], valid, self._codes)
            if self._codes is not self._host:
                self._host[: len(valid)].copy_(self._codes[: len(valid)])
        return self._packed, np.arange(len(valid))


class TcpReader(PieceReader):
    def __init__(self, channel: Channel, pool: RegisteredPool) -> None:
        self._channel = channel
        self._pool = pool

    def read(self, sources: BlockIndices, targets: BlockIndices, gate: WriteGate) -> bool:
        trailer = bytearray(len(GOOD))
        blocks = views(self._pool.buffer, self._pool.block_bytes, targets)
        rest = ScatterList([blocks, memoryview(trailer)])
        while rest.remaining:
            received = self._receive(rest, gate)
            rest.advance(received)
            if not received:
                self._channel.wait(select.POLLIN, self._channel.progress_deadline())
        if not gate.is_open:
            return False
        if trailer not in (GOOD, SPOILED):
            raise ProtocolError("a piece's blocks do not end where they should")
        return trailer == GOOD

    def _receive(self, rest: ScatterList, gate: WriteGate) -> int:
        with gate.writing() as is_open:
            if is_open:
                return self._channel.receive(rest.batch())
        return self._channel.receive([_DISCARDED[: rest.remaining]])


class TcpTransport(Transport):
    name = "tcp"

    def __init__(self, streams: int = 1, wire_dtype: str = "auto") -> None:
        self.streams = streams
        self.wire_dtype = wire_dtype

    def writer(self, channel: Channel, pool: RegisteredPool, deadline: float) -> PieceWriter:
        _bound_buffers(channel.socket)
        if self.wire_dtype != "auto":
            return QuantizingWriter(pool, self.wire_dtype)
        return PieceWriter(pool) if pool.device is None else StagingWriter(pool)

    def reader(self, channel: Channel, target: RegisteredPool, hello: Hello, deadline: float) -> TcpReader:
        tune(channel.socket)
        _bound_buffers(channel.socket)
        return TcpReader(channel, target)
