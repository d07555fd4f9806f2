"""The `tcp` transport: blocks follow their piece's message, from pool to pool, within TLS if configured."""

from __future__ import annotations

import contextlib
import select
import socket
import ssl
from collections.abc import Sequence
from functools import cached_property
from typing import NoReturn

import numpy as np
import torch

from kvtransfer.blocks.codec import CODEC, Codec, UndecodableError, is_available, slices
from kvtransfer.blocks.convert import Quantizer
from kvtransfer.blocks.device import ArrivingViews, BlockGatherer, pinned
from kvtransfer.blocks.extents import BlockIndices, Blocks, Buffers, ScatterList, blocks_per_part, views
from kvtransfer.blocks.layout import tokens_in_blocks
from kvtransfer.interface import RegisteredPool
from kvtransfer.lease import WriteGate
from kvtransfer.messages import GOOD, SIZE_BYTES, SPOILED, Buffer, Channel, Hello
from kvtransfer.transports.transport import PieceReader, PieceWriter, Transport, tune
from messaging.files import TlsFiles
from messaging.wake import Wake
from protocol.errors import ProtocolError

_HOST_SEND_BYTES = 512 * 1024
_HOST_WINDOW_BYTES = 1024 * 1024
_DISCARDED = memoryview(bytearray(1024 * 1024))


def _bound_buffers(sock: socket.socket) -> None:
    """Within one host, keep the socket's buffers small enough for a cache.

    The kernel would let them grow to tens of megabytes, although no network delay needs that. Between hosts
    the kernel chooses the sizes, as large as the path needs.
    """
    if sock.getpeername()[0] != sock.getsockname()[0]:
        return
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _HOST_SEND_BYTES)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_WINDOW_CLAMP, _HOST_WINDOW_BYTES)


class StagingWriter(PieceWriter):
    """A writer that copies each piece from a device to the host, and sends what has arrived meanwhile."""

    def __init__(self, pool: RegisteredPool) -> None:
        super().__init__(pool)
        assert pool.device is not None
        self._gatherer = BlockGatherer(pool.device, pool.queue, blocks_per_part(pool.block_bytes))
        self._arriving = ArrivingViews(self._gatherer.buffer, [], [])

    def source(self, blocks: Blocks, num_tokens: int) -> tuple[memoryview, BlockIndices]:
        self._arriving = self._gatherer.gather(blocks[0])
        return self._gatherer.buffer, np.arange(blocks.shape[1])

    def wait_arrived(self) -> None:
        self._arriving[:]

    def payload(self, buffer: memoryview, indices: BlockIndices) -> Buffers:
        return [self._arriving, memoryview(GOOD)]


class QuantizingWriter(PieceWriter):
    """A writer that packs each piece, one byte a value and some scales, on the pool's device."""

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
        return gate.is_open and _is_good(trailer)

    def read_coded(self, targets: BlockIndices, gate: WriteGate) -> bool:
        codec, pool, is_whole = self._codec, self._pool, True
        self.saved_bytes = 0
        for first, last in slices(len(targets) * pool.block_bytes):
            size = self._word()
            if size == SPOILED:
                return False
            nbytes = int.from_bytes(size, "little")
            if not 0 < nbytes <= last - first:
                raise ProtocolError(f"a coded slice of {nbytes} bytes, for {last - first}")
            self._fill(codec.staging[:nbytes])
            self.saved_bytes += last - first - nbytes
            with gate.writing() as is_open:
                if is_open:
                    is_whole &= codec.decode(nbytes, pool.buffer, targets, first, last)
        is_good = _is_good(self._word())
        if is_good and not is_whole:
            raise UndecodableError
        return is_good and gate.is_open

    @cached_property
    def _codec(self) -> Codec:
        return Codec(self._pool.block_bytes)

    def _word(self) -> bytearray:
        return self._channel.recv_exact(SIZE_BYTES, self._channel.progress_deadline())

    def _fill(self, target: memoryview) -> None:
        while target:
            received = self._channel.receive([target])
            target = target[received:]
            if not received:
                self._channel.wait(select.POLLIN, self._channel.progress_deadline())

    def _receive(self, rest: ScatterList, gate: WriteGate) -> int:
        with gate.writing() as is_open:
            if is_open:
                return self._channel.receive(rest.batch())
        return self._channel.receive([_DISCARDED[: rest.remaining]])


def _is_good(trailer: bytearray) -> bool:
    if trailer not in (GOOD, SPOILED):
        raise ProtocolError("a piece's blocks do not end where they should")
    return trailer == GOOD


class TcpTransport(Transport):
    name = "tcp"

    def __init__(self, streams: int = 1, wire_dtype: str = "auto", wire_codec: str = "auto") -> None:
        self.streams = streams
        self.wire_dtype = wire_dtype
        if wire_codec == wire_dtype == "auto" and is_available():
            self.codec = CODEC

    def writer(self, channel: Channel, pool: RegisteredPool, deadline: float) -> PieceWriter:
        _bound_buffers(channel.socket)
        if self.wire_dtype != "auto":
            return QuantizingWriter(pool, self.wire_dtype)
        return PieceWriter(pool) if pool.device is None else StagingWriter(pool)

    def reader(self, channel: Channel, target: RegisteredPool, hello: Hello, deadline: float) -> TcpReader:
        tune(channel.socket)
        _bound_buffers(channel.socket)
        return TcpReader(channel, target)


_CHUNK_BYTES = 128 * 1024
"""Bytes that are encrypted, or read from the socket, at once: they fit in the cache, and calls are few."""

_PROTOCOL_VERSION_ALERT = bytes.fromhex("15 0301 0002 02 46")

_NO_TLS = "TLS: the peer ended the handshake; it may have no TLS, or refuse our certificate"


class TlsChannel(Channel):
    """A channel within TLS. The TLS handshake happens with the first bytes that are sent or received.

    Raises ProtocolError for a peer without TLS or the right certificate, and for bytes changed in transit.
    """

    def __init__(
        self, sock: socket.socket, wake: Wake, progress_timeout_s: float, tls: ssl.SSLContext, accepted: bool
    ) -> None:
        super().__init__(sock, wake, progress_timeout_s)
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = tls.wrap_bio(self._incoming, self._outgoing, server_side=accepted)
        self._peeked = b""
        self._unsent = memoryview(b"")
        self._unreported = 0
        """Bytes of the caller's data that are encrypted in `_unsent` but not yet reported as sent."""
        self._sending_waits_for_input = False

    # --- waiting ----------------------------------------------------------------------------------

    def wait(self, events: int, deadline: float | None) -> int:
        """Wait for the events. TLS may have to read before it can write, and vice versa."""
        if events & select.POLLIN and self._has_plaintext():
            return events
        awaited = events
        if events & select.POLLOUT and self._sending_waits_for_input:
            awaited = events & ~select.POLLOUT | select.POLLIN
        ready = super().wait(awaited, deadline)
        return events | ready if ready else 0

    def at_end(self) -> bool:
        if self._has_plaintext():
            return False
        byte = bytearray(1)
        try:
            self._peeked = bytes(byte[: self._read(memoryview(byte))])
        except BlockingIOError:
            return False
        return not self._peeked

    def _has_plaintext(self) -> bool:
        if not (self._peeked or self._tls.pending()) and self._incoming.pending:
            try:
                self._peeked = self._tls.read(1)
            except ssl.SSLWantReadError:
                return False
            except ssl.SSLError as error:
                self._fail(error)
        return bool(self._peeked or self._tls.pending())

    # --- sending ----------------------------------------------------------------------------------

    def write(self, buffers: Sequence[Buffer]) -> int:
        """Return how many bytes were sent. If 0, some may be encrypted already and will still be sent."""
        try:
            if not self._unreported:
                self._encrypt(buffers)
            self._flush()
        except BlockingIOError:
            return 0
        sent, self._unreported = self._unreported, 0
        return sent

    def _encrypt(self, buffers: Sequence[Buffer]) -> None:
        while True:
            try:
                self._unreported = self._encrypt_some(buffers)
            except ssl.SSLWantReadError:  # the handshake comes before the first record
                self._sending_waits_for_input = True
                self._flush()
                if not self._feed():
                    raise ProtocolError(_NO_TLS) from None
            except ssl.SSLError as error:
                self._fail(error)
            else:
                self._sending_waits_for_input = False
                return

    def _encrypt_some(self, buffers: Sequence[Buffer]) -> int:
        total = 0
        for buffer in buffers:
            rest = memoryview(buffer)
            while rest and total < _CHUNK_BYTES:
                written = self._tls.write(rest)
                total += written
                rest = rest[written:]
        return total

    def _flush(self) -> None:
        while self._unsent or self._outgoing.pending:
            if not self._unsent:
                self._unsent = memoryview(self._outgoing.read())
            self._unsent = self._unsent[self.socket.send(self._unsent) :]

    # --- receiving --------------------------------------------------------------------------------

    def receive(self, buffers: Sequence[Buffer]) -> int:
        received = 0
        for buffer in buffers:
            rest = memoryview(buffer)
            while rest:
                try:
                    some = self._read(rest)
                except BlockingIOError:
                    return received
                if not some and not received:
                    raise ConnectionResetError("the peer closed the connection")
                if not some:
                    return received
                received += some
                rest = rest[some:]
        return received

    def _read(self, target: memoryview) -> int:
        """Read into `target`; return 0 at the end. Raises BlockingIOError if no data is available."""
        if self._peeked:
            count = min(len(target), len(self._peeked))
            target[:count] = self._peeked[:count]
            self._peeked = self._peeked[count:]
            return count
        while True:
            try:
                return int(self._tls.read(len(target), target))
            except ssl.SSLWantReadError:
                self._flush()
                if not self._feed():
                    return self._end()
            except ssl.SSLError as error:
                self._fail(error)

    def _feed(self) -> bool:
        """Read the bytes that have arrived; return False at the end of the connection."""
        try:
            data = self.socket.recv(_CHUNK_BYTES)
        except ConnectionError:
            if self._tls.version() is not None:
                raise
            data = b""
        self._incoming.write(data)
        return bool(data)

    def _end(self) -> int:
        if self._tls.version() is None:
            raise ProtocolError(_NO_TLS)
        return 0

    def _fail(self, error: ssl.SSLError) -> NoReturn:
        """Send the TLS alert, then raise ProtocolError."""
        with contextlib.suppress(OSError):
            self._flush()
            if error.reason == "WRONG_VERSION_NUMBER":  # OpenSSL itself sends no alert to such a peer
                self.socket.send(_PROTOCOL_VERSION_ALERT)
        raise ProtocolError(f"TLS: {_reason(error)}") from error


class TlsTransport(TcpTransport):
    """The `tcp` transport within TLS. Raises ConfigError for certificates that can't be used."""

    def __init__(
        self, files: TlsFiles, streams: int = 1, wire_dtype: str = "auto", wire_codec: str = "auto"
    ) -> None:
        super().__init__(streams, wire_dtype, wire_codec)
        self._contexts = {accepted: files.context(server_side=accepted) for accepted in (False, True)}

    def channel(
        self, sock: socket.socket, wake: Wake, progress_timeout_s: float, *, accepted: bool
    ) -> TlsChannel:
        return TlsChannel(sock, wake, progress_timeout_s, self._contexts[accepted], accepted)


def _reason(error: ssl.SSLError) -> str:
    reason = error.reason or str(error)
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"the peer's certificate is refused: {error.verify_message}"
    if "ALERT" in reason:
        return f"the peer refuses our certificate, or our TLS ({reason})"
    if reason in ("WRONG_VERSION_NUMBER", "HTTP_REQUEST"):
        return f"the peer does not speak it ({reason})"
    return reason
