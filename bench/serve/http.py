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

import httptools

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


class Exchange(asyncio.Protocol):
    """One request and its response, whose pieces are passed to `on_body` as they arrive.

    `done` resolves to the status once the body is complete; it fails with HttpError if the response is cut
    short. The parser calls the public methods below `connection_lost`.
    """

    def __init__(self, request: bytes, on_body: BodyHandler) -> None:
        self.done: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._request, self._pass_on = request, on_body
        self._parser = httptools.HttpResponseParser(self)
        self._status = 0
        self._pieces: list[bytes] = []
        self._tells_its_end = self._is_complete = False
        self._transport: asyncio.WriteTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.WriteTransport, transport)
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        if self.done.done():
            return
        try:
            self._parser.feed_data(data)
            if self._pieces:
                body, self._pieces = b"".join(self._pieces), []
                self._pass_on(self._status, body)
        except httptools.HttpParserError as error:
            self._finish(HttpError(f"not an HTTP/1.1 response: {error}"))
        except Exception as error:
            self._finish(error)
        else:
            if self._is_complete:
                self._finish(None)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._status and not self._tells_its_end and exc is None:
            self._finish(None)  # a body without a length ends with its connection
        else:
            self._finish(HttpError(f"connection closed early{f': {exc}' if exc else ''}"))

    def on_header(self, name: bytes, value: bytes) -> None:
        self._tells_its_end |= name.lower() in (b"content-length", b"transfer-encoding")

    def on_headers_complete(self) -> None:
        self._status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        self._pieces.append(body)

    def on_message_complete(self) -> None:
        self._is_complete = True

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def _finish(self, error: Exception | None) -> None:
        if not self.done.done():
            if error is None:
                self.done.set_result(self._status)
            else:
                self.done.set_exception(error)
        self.close()


async def exchange(
    endpoint: Endpoint, request: bytes, on_body: BodyHandler, tls: ssl.SSLContext | None = None
) -> int:
    """Send `request`, call `on_body` with each piece of the answer, and return the status at its end.

    Raises OSError if the connection fails, HttpError if the response is cut short, and the errors of
    `on_body`.
    """
    loop = asyncio.get_running_loop()
    _, protocol = await loop.create_connection(
        lambda: Exchange(request, on_body), endpoint.host, endpoint.port, ssl=tls if endpoint.tls else None
    )
    try:
        return await protocol.done
    finally:
        protocol.close()
