"""The `tcp` transport: blocks follow their piece's message on the stream, straight from pool to pool."""

from __future__ import annotations

import select
import socket
import time

import numpy as np
from torch import Tensor

from kvtransfer.blocks.device import BlockGatherer
from kvtransfer.blocks.extents import BlockIndices, Blocks, Buffers, ScatterList, blocks_per_part, views
from kvtransfer.blocks.layout import tokens_in_blocks
from kvtransfer.blocks.quantize import Quantizer
from kvtransfer.framing.channel import Channel
from kvtransfer.framing.messages import GOOD, SPOILED, Hello
from kvtransfer.interface import RegisteredPool
from kvtransfer.leases.gate import WriteGate
from kvtransfer.transports.sockets import connect_tcp, listen_tcp, tune
from kvtransfer.transports.transport import Listener, PieceWriter
from protocol.errors import ProtocolError

_SCRATCH_BYTES = 1024 * 1024
_HOST_SEND_BYTES = 512 * 1024
_HOST_WINDOW_BYTES = 1024 * 1024


def _bound_buffers(sock: socket.socket) -> None:
    """Within one host, keep what is on its way small enough to be found in a cache.

    There the kernel lets it grow to tens of megabytes, for no delay that it had to cover. Between hosts the
    sizes stay the kernel's: it grows them as far as the path needs.
    """
    if sock.getpeername()[0] != sock.getsockname()[0]:
        return
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _HOST_SEND_BYTES)
    if hasattr(socket, "TCP_WINDOW_CLAMP"):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_WINDOW_CLAMP, _HOST_WINDOW_BYTES)


class TcpWriter:
    remote_reads = False
    packed = None

    def __init__(self, pool: RegisteredPool) -> None:
        self._pool = pool

    def payload(self, blocks: Blocks, num_tokens: int) -> Buffers:
        return [views(self._pool.buffer, self._pool.block_bytes, blocks[0]), memoryview(GOOD)]

    def close(self) -> None:
        return


class StagingWriter:
    """Brings each piece from a device's memory to the host: one piece is written at a time."""

    remote_reads = False

    def __init__(self, blocks: Tensor, max_blocks: int) -> None:
        self._gatherer = BlockGatherer(blocks, max_blocks)
        self.packed: memoryview | None = None

    def payload(self, blocks: Blocks, num_tokens: int) -> list[memoryview]:
        self.packed = self._gatherer.gather(blocks[0])
        return [self.packed, memoryview(GOOD)]

    def close(self) -> None:
        return


class QuantizingWriter:
    """Packs each piece as one byte a value and some scales, in one buffer: one piece is written at a time."""

    remote_reads = False

    def __init__(self, pool: RegisteredPool, wire_dtype: str, max_blocks: int) -> None:
        self._pool = pool
        self._quantizer = Quantizer(pool.segments, wire_dtype)
        self._gatherer = BlockGatherer(pool.device, max_blocks) if pool.device is not None else None
        self.packed = memoryview(bytearray(max_blocks * self._quantizer.wire_block_bytes))

    def payload(self, blocks: Blocks, num_tokens: int) -> Buffers:
        sources, positions = blocks
        valid = tokens_in_blocks(positions, self._pool.block_size, num_tokens)
        source = self._pool.buffer
        if self._gatherer is not None:
            source, sources = self._gatherer.gather(sources), np.arange(len(sources))
        self._quantizer.pack(source, sources, valid, self.packed)
        return [self.packed[: len(sources) * self._quantizer.wire_block_bytes], memoryview(GOOD)]

    def close(self) -> None:
        return


class TcpReader:
    def __init__(self, channel: Channel, pool: RegisteredPool, progress_timeout_s: float) -> None:
        self._channel = channel
        self._pool = pool
        self._progress_timeout_s = progress_timeout_s
        self._scratch: memoryview | None = None

    def read(self, sources: BlockIndices, targets: BlockIndices, gate: WriteGate | None) -> bool:
        trailer = bytearray(len(GOOD))
        if gate is None:
            self._discard(len(targets) * self._pool.block_bytes + len(trailer))
            return False
        blocks = views(self._pool.buffer, self._pool.block_bytes, targets)
        rest = ScatterList([blocks, memoryview(trailer)])
        while rest.remaining:
            with gate.writing() as still_open:
                received = self._receive(rest.batch()) if still_open else 0
            if not still_open:
                self._discard(rest.remaining)
                return False
            if received:
                rest.advance(received)
            else:
                self._await_bytes()
        if trailer not in (GOOD, SPOILED):
            raise ProtocolError("a piece's blocks do not end where they should")
        return trailer == GOOD

    def close(self) -> None:
        self._scratch = None

    def _receive(self, buffers: list[memoryview]) -> int:
        """Bytes that were there already; 0 if none."""
        try:
            received = self._channel.socket.recvmsg_into(buffers)[0]
        except BlockingIOError:
            return 0
        if received == 0:
            raise ConnectionResetError("the peer closed the connection")
        return received

    def _await_bytes(self) -> None:
        self._channel.wait(select.POLLIN, time.monotonic() + self._progress_timeout_s)

    def _discard(self, nbytes: int) -> None:
        if self._scratch is None:
            self._scratch = memoryview(bytearray(_SCRATCH_BYTES))
        while nbytes:
            received = self._receive([self._scratch[:nbytes]])
            if not received:
                self._await_bytes()
            nbytes -= received


class TcpTransport:
    name = "tcp"
    same_host = False
    reaches_devices = False
    parts_at_once = 1

    def __init__(self, streams: int = 1, wire_dtype: str = "auto") -> None:
        self.streams = streams
        self.wire_dtype = wire_dtype

    def close(self) -> None:
        return

    def listen(self, host: str) -> tuple[Listener, str]:
        return listen_tcp(host)

    def connect(self, address: str) -> socket.socket:
        return connect_tcp(address)

    def writer(self, channel: Channel, pool: RegisteredPool, deadline: float) -> PieceWriter:
        _bound_buffers(channel.socket)
        max_blocks = blocks_per_part(pool.block_bytes)
        if self.wire_dtype != "auto":
            return QuantizingWriter(pool, self.wire_dtype, max_blocks)
        if pool.device is not None:
            return StagingWriter(pool.device, max_blocks)
        return TcpWriter(pool)

    def reader(
        self, channel: Channel, pool: RegisteredPool, hello: Hello, deadline: float, progress_timeout_s: float
    ) -> TcpReader:
        tune(channel.socket)
        _bound_buffers(channel.socket)
        return TcpReader(channel, pool, progress_timeout_s)
