"""Reading request bodies: each is bounded in size and time, and all together in memory."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from starlette.requests import Request

from router.errors import ApiError

BODY_TIMEOUT_S = 20.0
MIN_BYTES_PER_S = 64 * 1024
"""A body gets so much more time as it needs at this rate for what has come of it."""
DISCARD_TIMEOUT_S = 5.0
MAX_BODIES = 16
"""Of the largest size, in memory at once."""


class Bodies:
    """The bodies that are being read or decoded."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._held = 0

    @contextlib.asynccontextmanager
    async def read(self, request: Request) -> AsyncIterator[bytes]:
        """The whole body, which counts against the limits until the block ends.

        Raises `ApiError`: 413 if it is too large, 503 if all bodies together are, 408 if it is late. Raises
        `ClientDisconnect`.
        """
        parts: list[bytes] = []
        try:
            if (refusal := await self._read_in_time(request, parts)) is not None:
                await self._discard(request)
                raise refusal
            yield b"".join(parts)
        finally:
            self._held -= sum(map(len, parts))

    async def _read_in_time(self, request: Request, parts: list[bytes]) -> ApiError | None:
        try:
            async with asyncio.timeout(BODY_TIMEOUT_S) as limit:
                return await self._read(request, parts, limit)
        except TimeoutError:
            rate = f"and a second more for each {MIN_BYTES_PER_S} bytes"
            raise _refusal(408, f"the body did not come within {BODY_TIMEOUT_S:g} s, {rate}") from None

    async def _read(self, request: Request, parts: list[bytes], limit: asyncio.Timeout) -> ApiError | None:
        """Append what comes to `parts`; returns why the body is refused."""
        too_large = f"the body exceeds the limit of {self._max_bytes} bytes (--max-body-bytes)"
        if int(request.headers.get("content-length", 0)) > self._max_bytes:
            return _refusal(413, too_large)
        received = 0
        async for part in request.stream():
            received += len(part)
            if received > self._max_bytes:
                return _refusal(413, too_large)
            if self._held + len(part) > MAX_BODIES * self._max_bytes:
                return _refusal(503, "too many request bodies at once", retry_after_s=1.0)
            parts.append(part)
            self._held += len(part)
            limit.reschedule((limit.when() or 0.0) + len(part) / MIN_BYTES_PER_S)
        return None

    async def _discard(self, request: Request) -> None:
        """Read on for a while, so that a client that is still sending gets to see the answer."""
        size = 0
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(DISCARD_TIMEOUT_S):
                async for part in request.stream():
                    size += len(part)
                    if size > 4 * self._max_bytes:
                        return


def _refusal(status: int, message: str, retry_after_s: float | None = None) -> ApiError:
    """For a client that may still be sending: the connection can't be used again."""
    return ApiError(status, message, retry_after_s=retry_after_s, headers={"connection": "close"})
