"""A fast HTTP/1.1 client for one streamed exchange.

The load generator shares the machine with the server it measures, so its own cost counts. One asyncio
protocol per request parses the response as it arrives and passes on the body's pieces: no stream reader, no
task switch for each token.
"""

import asyncio
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast
from urllib.parse import urlsplit

MAX_HEAD_BYTES = 64 * 1024

# Called with the response's status and a piece of its body.
BodyHandler = Callable[[int, bytes], None]


class HttpError(Exception):
    """The peer closed the connection early, or sent an invalid HTTP/1.1 response."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """The parts of a URL that a connection and a request line need."""

    host: str
    port: int
    path: str
    tls: bool

    @classmethod
    def parse(cls, url: str) -> "Endpoint":
        """Parse a URL. Raises ValueError if it is not an http or https URL."""
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"not an http or https URL: {url!r}")
        tls = parts.scheme == "https"
        return cls(parts.hostname, parts.port or (443 if tls else 80), parts.path or "/", tls)

    def request(self, method: str, body: bytes = b"", headers: dict[str, str] | None = None) -> bytes:
        """Return the bytes of a request that closes its connection."""
        fields = {
            "Host": f"{self.host}:{self.port}",
            "Content-Type": "application/json",
            "Content-Length": str(len(body)),
            "Connection": "close",
            **(headers or {}),
        }
        head = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
        return f"{method} {self.path} HTTP/1.1\r\n{head}\r\n".encode() + body


class ChunkedBody:
    """Incremental decoder of the chunked transfer coding (RFC 9112, section 7.1)."""

    def __init__(self) -> None:
        self._buffer = b""
        self.finished = False

    def feed(self, data: bytes) -> bytes:
        """Decode bytes from the wire. Return the payload bytes that are complete so far."""
        buffer = self._buffer + data if self._buffer else data
        payload = []
        position = 0
        while not self.finished:
            line_end = buffer.find(b"\r\n", position)
            if line_end < 0:
                break
            size = self._size(buffer[position:line_end])
            start, end = line_end + 2, line_end + 2 + size
            if len(buffer) < end + 2:
                break
            if size:
                payload.append(buffer[start:end])
            self.finished = size == 0
            position = end + 2
        self._buffer = buffer[position:]
        return b"".join(payload)

    @staticmethod
    def _size(line: bytes) -> int:
        try:
            return int(line.split(b";", 1)[0], 16)
        except ValueError:
            raise HttpError(f"bad chunk size {line[:32]!r}") from None


class Exchange(asyncio.Protocol):
    """Sends one request and passes each piece of the response's body to `on_body` as it arrives.

    `done` resolves to the status once the body is complete; it fails with HttpError if the response is cut
    short.
    """

    def __init__(self, request: bytes, on_body: BodyHandler) -> None:
        self.status = 0
        self.done: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._request = request
        self._on_body = on_body
        self._head = b""
        self._chunked: ChunkedBody | None = None
        self._remaining: int | None = None
        self._transport: asyncio.WriteTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.WriteTransport, transport)
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        try:
            if not self.status:
                rest = self._read_head(data)
                if rest is None:
                    return
                data = rest
            self._read_body(data)
        except Exception as error:
            self._finish(error)

    def connection_lost(self, exc: Exception | None) -> None:
        if self.status and self._chunked is None and self._remaining is None and exc is None:
            self._finish(None)  # a body without a length ends with its connection
        else:
            self._finish(HttpError(f"connection closed early{f': {exc}' if exc else ''}"))

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def _read_head(self, data: bytes) -> bytes | None:
        self._head += data
        end = self._head.find(b"\r\n\r\n")
        if end < 0:
            if len(self._head) > MAX_HEAD_BYTES:
                raise HttpError(f"response head is longer than {MAX_HEAD_BYTES} bytes")
            return None
        status_line, *lines = self._head[:end].decode("latin-1").split("\r\n")
        version, _, rest = status_line.partition(" ")
        if not version.startswith("HTTP/1.") or not rest[:3].isdigit():
            raise HttpError(f"not an HTTP/1.1 response: {status_line[:64]!r}")
        pairs = (line.partition(":") for line in lines)
        fields = {name.strip().lower(): value.strip() for name, _, value in pairs}
        if fields.get("transfer-encoding", "").lower() == "chunked":
            self._chunked = ChunkedBody()
        elif "content-length" in fields:
            self._remaining = int(fields["content-length"])
        self.status = int(rest[:3])
        return self._head[end + 4 :]

    def _read_body(self, data: bytes) -> None:
        if self._chunked is not None:
            payload = self._chunked.feed(data)
            if payload:
                self._on_body(self.status, payload)
            if self._chunked.finished:
                self._finish(None)
            return
        if data:
            self._on_body(self.status, data)
        if self._remaining is not None:
            self._remaining -= len(data)
            if self._remaining <= 0:
                self._finish(None)

    def _finish(self, error: Exception | None) -> None:
        if not self.done.done():
            if error is None:
                self.done.set_result(self.status)
            else:
                self.done.set_exception(error)
        self.close()


async def exchange(
    endpoint: Endpoint, request: bytes, on_body: BodyHandler, tls: ssl.SSLContext | None = None
) -> int:
    """Send `request`, call `on_body` with each piece of the answer, and return the status at its end.

    Raises OSError if the connection fails, HttpError if the response is cut short, and whatever `on_body`
    raises.
    """
    loop = asyncio.get_running_loop()
    _, protocol = await loop.create_connection(
        lambda: Exchange(request, on_body), endpoint.host, endpoint.port, ssl=tls if endpoint.tls else None
    )
    try:
        return await protocol.done
    finally:
        protocol.close()
