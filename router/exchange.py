"""One HTTP request and its answer, straight on ASGI: bounded body, JSON, SSE, disconnect."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from router.errors import ApiError

REQUEST_ID_KEY = "tandem.request_id"
BODY_TIMEOUT_S = 60.0
DISCARD_TIMEOUT_S = 5.0
MAX_BODIES = 16
"""Of the largest size, in memory at once."""


def _refusal(status: int, message: str, retry_after_s: float | None = None) -> ApiError:
    """For a client that may still be sending: the connection can't be used again."""
    return ApiError(status, message, retry_after_s=retry_after_s, headers={"connection": "close"})


class Bodies:
    """How much memory request bodies may take: each one, and all together until they are decoded."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.max_sum = MAX_BODIES * max_bytes
        self.held = 0


class Exchange:
    """What a handler sees of one request."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, bodies: Bodies) -> None:
        self.scope = scope
        self.request_id: str = scope[REQUEST_ID_KEY]
        self._receive = receive
        self._send = send
        self._bodies = bodies

    @contextlib.asynccontextmanager
    async def body(self) -> AsyncIterator[bytes]:
        """The whole body, which counts against the limits until the block ends.

        Raises `ApiError`: 413 when it is too large, 503 when all bodies together are, 408 when it is late.
        """
        parts: list[bytes] = []
        try:
            refusal = await self._read_in_time(parts)
            if refusal is not None:
                await self._discard(4 * self._bodies.max_bytes)
                raise refusal
            yield b"".join(parts)
        finally:
            self._bodies.held -= sum(map(len, parts))

    async def _read_in_time(self, parts: list[bytes]) -> ApiError | None:
        try:
            async with asyncio.timeout(BODY_TIMEOUT_S):
                return await self._read(parts)
        except TimeoutError:
            return _refusal(408, f"the body did not come within {BODY_TIMEOUT_S:g} s")

    async def _read(self, parts: list[bytes]) -> ApiError | None:
        """Append what comes to `parts`; returns why the body is refused."""
        bodies = self._bodies
        size = int(Headers(scope=self.scope).get("content-length", 0))
        received = 0
        while max(size, received) <= bodies.max_bytes:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ClientGoneError
            part = message.get("body", b"")
            received += len(part)
            if received > bodies.max_bytes:
                break
            if bodies.held + len(part) > bodies.max_sum:
                return _refusal(503, "too many request bodies at once", retry_after_s=1.0)
            parts.append(part)
            bodies.held += len(part)
            if not message.get("more_body", False):
                return None
        return _refusal(413, f"the body exceeds the limit of {bodies.max_bytes} bytes (--max-body-bytes)")

    async def send_json(self, body: bytes) -> None:
        await Response(body, media_type="application/json")(self.scope, self._receive, self._send)

    async def start_events(self) -> None:
        """Begin a stream of server-sent events."""
        headers = [
            (b"content-type", b"text/event-stream; charset=utf-8"),
            (b"cache-control", b"no-cache"),
            (b"x-accel-buffering", b"no"),
        ]
        await self._send({"type": "http.response.start", "status": 200, "headers": headers})

    async def send_events(self, events: bytes, more: bool = True) -> None:
        """Waits while the client doesn't read."""
        await self._send({"type": "http.response.body", "body": events, "more_body": more})

    async def wait_disconnect(self) -> None:
        """Returns when the client is gone, or the answer is complete. Call it after the body was read."""
        while (await self._receive())["type"] != "http.disconnect":
            pass

    async def _discard(self, limit: int) -> None:
        """Read on for a while, so that a client that is still sending gets to see the answer."""
        size = 0
        try:
            async with asyncio.timeout(DISCARD_TIMEOUT_S):
                while size <= limit:
                    message = await self._receive()
                    if message["type"] == "http.disconnect" or not message.get("more_body", False):
                        return
                    size += len(message.get("body", b""))
        except TimeoutError:
            return


class ClientGoneError(Exception):
    """The client closed the connection before the answer began."""


Handler = Callable[[Exchange], Awaitable[None]]


class Endpoint:
    """Makes a handler of `Exchange` an ASGI application."""

    def __init__(self, handler: Handler, bodies: Bodies) -> None:
        self._handler = handler
        self._bodies = bodies

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._handler(Exchange(scope, receive, send, self._bodies))
