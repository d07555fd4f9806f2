"""One HTTP request and its answer, straight on ASGI: bounded body, JSON, SSE, disconnect."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any

from router.errors import ApiError

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Headers = Iterable[tuple[bytes, bytes]]

REQUEST_ID_KEY = "tandem.request_id"
BODY_TIMEOUT_S = 60.0
DISCARD_TIMEOUT_S = 5.0


def header(scope: Scope, name: bytes) -> bytes | None:
    for key, value in scope["headers"]:
        if key == name:
            return bytes(value)
    return None


async def send_response(
    send: Send, status: int, body: bytes, content_type: bytes = b"application/json", headers: Headers = ()
) -> None:
    length = str(len(body)).encode()
    fields = [(b"content-type", content_type), (b"content-length", length), *headers]
    await send({"type": "http.response.start", "status": status, "headers": fields})
    await send({"type": "http.response.body", "body": body})


async def send_error(send: Send, error: ApiError) -> None:
    await send_response(send, error.status, error.body(), headers=error.headers)


class Exchange:
    """What a handler sees of one request."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.scope = scope
        self.request_id: str = scope[REQUEST_ID_KEY]
        self._receive = receive
        self._send = send

    async def read_body(self, limit: int) -> bytes:
        """The whole body. Raises `ApiError` 413 above `limit` bytes, 408 when it doesn't come."""
        too_large = ApiError(
            413,
            f"the body exceeds the limit of {limit} bytes (--max-body-bytes)",
            headers=((b"connection", b"close"),),
        )
        declared = header(self.scope, b"content-length")
        if declared is not None and int(declared) > limit:
            await self._discard(4 * limit)
            raise too_large
        parts, size = [], 0
        try:
            async with asyncio.timeout(BODY_TIMEOUT_S):
                while True:
                    message = await self._receive()
                    if message["type"] == "http.disconnect":
                        raise ClientGoneError
                    part = message.get("body", b"")
                    parts.append(part)
                    size += len(part)
                    if size > limit:
                        break
                    if not message.get("more_body", False):
                        return b"".join(parts)
        except TimeoutError:
            raise ApiError(
                408,
                f"the body did not come within {BODY_TIMEOUT_S:g} s",
                headers=((b"connection", b"close"),),
            ) from None
        await self._discard(4 * limit)
        raise too_large

    async def send_json(self, body: bytes) -> None:
        await send_response(self._send, 200, body)

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

    def __init__(self, handler: Handler) -> None:
        self._handler = handler

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._handler(Exchange(scope, receive, send))
