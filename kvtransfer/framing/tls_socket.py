"""A socket that encrypts, for `Channel`."""

from __future__ import annotations

import contextlib
import select
import socket
import ssl
from collections.abc import Iterable
from typing import Any, NoReturn

from protocol.errors import ProtocolError

_CHUNK_BYTES = 128 * 1024
"""Encrypted, and read from the socket, at a time: it stays in the cache, and spares calls of the kernel."""

_PROTOCOL_VERSION_ALERT = bytes.fromhex("15 0301 0002 02 46")

_NO_TLS = "TLS: the peer ended the handshake; it may have no TLS, or refuse our certificate"


class TlsSocket(socket.socket):
    """Takes over a TCP socket, connected or about to be. It never blocks, but raises BlockingIOError.

    The methods that are overridden are those that `Channel` and the `tcp` transport use. The TLS handshake
    happens with the first bytes that are sent or received. Raises ProtocolError for a peer without TLS or
    without the right certificate, and for bytes that were changed on the way.
    """

    def __init__(self, sock: socket.socket, context: ssl.SSLContext, *, server_side: bool) -> None:
        super().__init__(fileno=sock.detach())
        self.setblocking(False)
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=server_side)
        self._peeked = b""
        self._unsent = memoryview(b"")
        self._owed = 0
        """How much of the caller's data lies encrypted in `_unsent`, and is not reported as sent yet."""
        self._sending_waits_for_input = False

    # --- waiting ----------------------------------------------------------------------------------

    def events_to_poll(self, events: int) -> int:
        """What to wait for on the connection instead of these events; 0 if there is nothing to wait for."""
        if events & select.POLLIN and self._has_plaintext():
            return 0
        if events & select.POLLOUT and self._sending_waits_for_input:
            return events & ~select.POLLOUT | select.POLLIN
        return events

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

    def send(self, data: Any, flags: int = 0, /) -> int:
        return self.sendmsg([data])

    def sendmsg(self, buffers: Iterable[Any], *unused: Any) -> int:
        """How much was sent. After BlockingIOError some may lie encrypted here, and can't be taken back."""
        if not self._owed:
            self._encrypt(list(buffers))
        self._flush()
        sent, self._owed = self._owed, 0
        return sent

    def _encrypt(self, buffers: list[Any]) -> None:
        while True:
            try:
                self._owed = self._write(buffers)
            except ssl.SSLWantReadError:  # before the first record there is the handshake
                self._sending_waits_for_input = True
                self._flush()
                if not self._feed():
                    raise ProtocolError(_NO_TLS) from None
            except ssl.SSLError as error:
                self._fail(error)
            else:
                self._sending_waits_for_input = False
                return

    def _write(self, buffers: list[Any]) -> int:
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
            self._unsent = self._unsent[super().send(self._unsent) :]

    # --- receiving --------------------------------------------------------------------------------

    def recv(self, size: int, flags: int = 0, /) -> bytes:
        data = bytearray(size)
        received = bytes(data[: self._read(memoryview(data))])
        if flags & socket.MSG_PEEK:
            self._peeked = received + self._peeked
        return received

    def recv_into(self, buffer: Any, nbytes: int = 0, flags: int = 0) -> int:
        return self._read(memoryview(buffer)[: nbytes or None])

    def recvmsg_into(self, buffers: Iterable[Any], *unused: Any) -> tuple[int, list[Any], int, Any]:
        """Fills the buffers as far as bytes have come."""
        received = 0
        for buffer in buffers:
            rest = memoryview(buffer)
            while rest:
                try:
                    some = self._read(rest)
                except BlockingIOError:
                    if not received:
                        raise
                    some = 0
                if not some:
                    return received, [], 0, None
                received += some
                rest = rest[some:]
        return received, [], 0, None

    def _read(self, target: memoryview) -> int:
        """0 at the end of the connection."""
        if self._peeked:
            count = min(len(target), len(self._peeked))
            target[:count] = self._peeked[:count]
            self._peeked = self._peeked[count:]
            return count
        while True:
            try:
                return int(self._tls.read(len(target), target))  # type: ignore[arg-type, call-overload]
            except ssl.SSLWantReadError:
                self._flush()
                if not self._feed():
                    return self._end()
            except ssl.SSLError as error:
                self._fail(error)

    def _feed(self) -> bool:
        """Take in what has come; False at the end of the connection."""
        try:
            data = super().recv(_CHUNK_BYTES)
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
        """Raises ProtocolError; the peer is told as well."""
        with contextlib.suppress(OSError):
            self._flush()
            if error.reason == "WRONG_VERSION_NUMBER":  # OpenSSL itself says nothing to such a peer
                super().send(_PROTOCOL_VERSION_ALERT)
        raise ProtocolError(f"TLS: {_reason(error)}") from error


def _reason(error: ssl.SSLError) -> str:
    reason = error.reason or str(error)
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"the peer's certificate is refused: {error.verify_message}"
    if "ALERT" in reason:
        return f"the peer refuses our certificate, or our TLS ({reason})"
    if reason in ("WRONG_VERSION_NUMBER", "HTTP_REQUEST"):
        return f"the peer does not speak it ({reason})"
    return reason
