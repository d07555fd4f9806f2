"""uvicorn's HTTP connection with limits on the connections, bytes and time of a client."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from native.process import raise_file_limit
from router.errors import ApiError
from router.observe.metrics import ConnectionEnd

logger = logging.getLogger(__name__)

MAX_CONNECTIONS = 8192
MAX_HEADERS = 128
MAX_HEAD_BYTES = 64 * 1024
HEAD_TIMEOUT_S = 10.0
"""Time limit for the headers, from the start of the connection or the first byte of its next request."""
UNREAD_TIMEOUT_S = 20.0
"""Time limit for a client to read the 48 KiB or so of its answer that are buffered."""
DISCARD_S = 2.0
"""Time in which a client that still sends must read its answer; it starts again while the client sends."""
MAX_DISCARD_S = 30.0
LOG_INTERVAL_S = 10.0
DIRECT_WRITER = "tandem.direct_writer"
"""Key of the direct writer in the state of a request's scope."""


class Connections:
    """All connections of a server. `idle`: those that wait for a request's headers, the oldest first."""

    def __init__(self, limit: int, on_end: Callable[[ConnectionEnd], None]) -> None:
        """Initialize. `on_end` counts connections that the server ends because of the client's behavior."""
        self.limit = limit
        self.on_end = on_end
        self.idle: dict[HttpConnection, None] = {}
        self.outbox = Outbox()
        self._next_log = 0.0

    def close_oldest_idle(self) -> bool:
        """Make room for another connection. Return False if all connections have requests."""
        if time.monotonic() >= self._next_log:
            text = "%d HTTP connections are open, the limit: the one idle longest is closed"
            logger.warning(text, self.limit)
            self._next_log = time.monotonic() + LOG_INTERVAL_S
        self.on_end("too_many")
        oldest = next(iter(self.idle), None)
        if oldest is None:
            return False
        del self.idle[oldest]
        oldest.transport.abort()
        return True


def connection_limit() -> int:
    """Raise the soft limit of open files as needed. Return the number of connections that may be open."""
    return min(MAX_CONNECTIONS, raise_file_limit(2 * MAX_CONNECTIONS) * 3 // 4)


class Outbox:
    """Chunks of many streams, written together after a step: single writes would thrash CPU caches."""

    def __init__(self) -> None:
        self._chunks: list[tuple[asyncio.Transport, bytes]] = []

    def put(self, transport: asyncio.Transport, chunk: bytes) -> None:
        if not self._chunks:
            asyncio.get_running_loop().call_soon(self._write)
        self._chunks.append((transport, chunk))

    def _write(self) -> None:
        chunks, self._chunks = self._chunks, []
        for transport, chunk in chunks:
            if not transport.is_closing():
                transport.write(chunk)


class DirectWriter:
    """A writer, without ASGI, to an answer that has begun. `is_ready` is true while the client reads."""

    __slots__ = ("_outbox", "_transport", "is_ready")

    def __init__(self, outbox: Outbox, transport: asyncio.Transport) -> None:
        self._outbox, self._transport = outbox, transport
        self.is_ready = True

    def write(self, body: bytes) -> None:
        """Write one chunk, not empty. It precedes anything that the answer's task sends later."""
        self._outbox.put(self._transport, b"%x\r\n%b\r\n" % (len(body), body))


class AnswerTransport:
    """The transport of an answer. uvicorn calls `close` once the connection's last answer is written."""

    __slots__ = ("close", "is_closing", "write")

    def __init__(self, transport: asyncio.Transport, close: Callable[[], None]) -> None:
        self.write, self.is_closing, self.close = transport.write, transport.is_closing, close


class HttpConnection(HttpToolsProtocol):
    """A client's connection. Errors have OpenAI's format, also for data that is not HTTP.

    If an answer is sent before the request's body is complete, the connection ends: a client that waits for
    `100 Continue` may never send the body.
    """

    def __init__(self, *, connections: Connections, **uvicorn: Any) -> None:
        super().__init__(**uvicorn)
        self._all = connections
        self._refusal: ApiError | None = None
        self._discards = False
        self._is_silent = False
        self._keeps_alive = False
        self._in_head = False
        self._asks_for_upgrade = False
        self._head_bytes = 0
        self._deadline: asyncio.TimerHandle | None = None
        self._unread: asyncio.TimerHandle | None = None
        self._direct: DirectWriter
        self._answers: AnswerTransport
        self._running: RequestResponseCycle | None = None
        """Request that is being answered; `cycle` is the newest request, which may still wait for its turn.
        """

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._direct = DirectWriter(self._all.outbox, transport)
        self._answers = AnswerTransport(transport, self._answered)
        if len(self.connections) > self._all.limit and not self._all.close_oldest_idle():
            self._refuse(ApiError(503, "too many connections", retry_after_s=1.0))
            transport.close()
            return
        self._all.idle[self] = None
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._direct.is_ready = False
        self._all.idle.pop(self, None)
        self._cancel_deadline()
        self._cancel_unread()
        super().connection_lost(exc)
        if self._running is not None and not self._running.response_complete:
            self._running.disconnected = True
            self._running.message_event.set()

    def data_received(self, data: bytes) -> None:
        if self._discards:
            self._is_silent = False
            return
        was_in_head = self._in_head
        self._parse(data)
        if was_in_head and self._in_head:
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES:
                self._refuse(_too_large(), "large_head")
        if self._deadline is None and not self._has_request and not self._discards:
            self._await_head()

    def _parse(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        rest = memoryview(data)
        while rest:
            try:
                self.parser.feed_data(rest)
                return
            except httptools.HttpParserError:
                self.send_400_response("the request is not HTTP/1.1 or HTTP/1.0")
                return
            except httptools.HttpParserUpgrade as upgrade:
                if not self._asks_for_upgrade:
                    return
                rest = rest[upgrade.args[0] :]
                self._parse_head_without_upgrade()

    def _parse_head_without_upgrade(self) -> None:
        """Parse the head again as if it did not ask for another protocol, like Java's client for HTTP/2.
        The parser takes the body for that protocol's.
        """
        line = (self.parser.get_method(), self.url, self.parser.get_http_version().encode())
        headers = [b"%b: %b\r\n" % header for header in self.headers if header[0] != b"upgrade"]
        self._asks_for_upgrade = False
        self.parser = httptools.HttpRequestParser(self)
        self.parser.feed_data(b"%b %b HTTP/%b\r\n%b\r\n" % (*line, b"".join(headers)))

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head, self._head_bytes = True, 0

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count(len(name) + len(value))
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._asks_for_upgrade = self.parser.should_upgrade() and self.parser.get_method() != b"CONNECT"
        if self._asks_for_upgrade:
            return
        self._in_head = False
        self._cancel_deadline()
        self._all.idle.pop(self, None)
        super().on_headers_complete()
        self.cycle.transport = self._answers  # type: ignore[assignment]
        self._keeps_alive, self.cycle.keep_alive = self.cycle.keep_alive, False
        if self.scope["http_version"] == "1.0":
            _end_without_chunks(self.cycle)
        else:
            self.scope["state"][DIRECT_WRITER] = self._direct

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, app)

    def on_message_complete(self) -> None:
        if self._asks_for_upgrade:
            return
        super().on_message_complete()
        if not self.cycle.response_started:
            self.cycle.keep_alive = self._keeps_alive

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._discards:
            self._unset_keepalive_if_required()
        elif not self._has_request and not self.transport.is_closing():
            self._all.idle[self] = None

    def pause_writing(self) -> None:
        super().pause_writing()
        self._direct.is_ready = False
        self._unread = self.loop.call_later(UNREAD_TIMEOUT_S, self._is_not_read)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._direct.is_ready = True
        self._cancel_unread()

    def send_400_response(self, msg: str) -> None:
        if self._refusal is not None:
            self._refuse(self._refusal, "large_head")
        else:
            self._refuse(ApiError(400, msg), "malformed")

    @property
    def _has_request(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _count(self, num_bytes: int) -> None:
        self._head_bytes += num_bytes
        if self._head_bytes > MAX_HEAD_BYTES or len(self.headers) >= MAX_HEADERS:
            self._refusal = _too_large()
            raise self._refusal  # the parser stops and calls `send_400_response`

    def _await_head(self) -> None:
        self._deadline = self.loop.call_later(HEAD_TIMEOUT_S, self._head_is_late)

    def _cancel_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _head_is_late(self) -> None:
        self._refuse(ApiError(408, f"the headers did not come within {HEAD_TIMEOUT_S:g} s"), "late_head")

    def _is_not_read(self) -> None:
        """Abort the connection; its request ends as if the client had gone."""
        self._all.on_end("unread")
        self.transport.abort()

    def _cancel_unread(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None

    def _answered(self) -> None:
        running = self._running
        if running is not None and running.response_complete and running.more_body:
            self._discard(MAX_DISCARD_S)
        else:
            self.transport.close()

    def _refuse(self, error: ApiError, end: ConnectionEnd | None = None) -> None:
        """Answer with the error and close. Abort instead if this or an earlier request's answer has begun."""
        self._discards = True
        if end is not None:
            self._all.on_end(end)
        self._cancel_deadline()
        self._unset_keepalive_if_required()
        if self.transport.is_closing():
            return
        if self._has_request and not self._is_in_body:
            self.transport.abort()
            return
        body = error.body()
        headers = (b"content-type: application/json", b"content-length: %d" % len(body), b"connection: close")
        head = STATUS_LINE[error.status] + b"\r\n".join(headers)
        self.transport.write(head + b"\r\n\r\n" + body)
        if self._has_request:  # tells the request's handler that the client is gone
            self.cycle.disconnected = self.cycle.response_complete = True
            self.cycle.message_event.set()
        self._discard(DISCARD_S)

    @property
    def _is_in_body(self) -> bool:
        """Whether the only request without an answer is still being received."""
        return self.cycle.more_body and not self.cycle.response_started and not self.pipeline

    def _discard(self, seconds: float) -> None:
        """Discard further data, then close: a client that still sends may not read its answer yet."""
        self._discards = True
        if self.transport.can_write_eof():  # TLS cannot
            self.transport.write_eof()
        self._all.idle[self] = None
        self.flow.resume_reading()
        self._discard_until(self.loop.time() + seconds)

    def _discard_until(self, deadline: float) -> None:
        if self._is_silent or self.loop.time() >= deadline:
            self.transport.abort()
            return
        self._is_silent = True
        self._deadline = self.loop.call_later(DISCARD_S, self._discard_until, deadline)


def _end_without_chunks(cycle: RequestResponseCycle) -> None:
    """Send answers of unknown length without chunks, which HTTP/1.0 lacks; closing ends them."""
    send, has_length = cycle.send, False

    async def send_unchunked(message: Any) -> None:
        nonlocal has_length
        if message["type"] == "http.response.start":
            has_length = any(name.lower() == b"content-length" for name, _ in message["headers"])
            cycle.chunked_encoding = None if has_length else False
        elif not has_length:
            cycle.expected_content_length = len(message.get("body", b""))
        await send(message)

    cycle.send = send_unchunked  # type: ignore[method-assign]


def _too_large() -> ApiError:
    return ApiError(431, f"more than {MAX_HEADERS} headers, or than {MAX_HEAD_BYTES} bytes of them")
