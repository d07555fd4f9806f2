"""Reads request bodies. Each is limited in size and time, and all together in memory."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from starlette.requests import Request

from router.errors import ApiError

BODY_TIMEOUT_S = 20.0
MIN_BYTES_PER_S = 64 * 1024
"""The time limit grows by the time that the received bytes take at this rate."""
SMALL_BYTES = 64 * 1024
"""The largest body of an operator's request, which is decoded in the event loop."""
MAX_BODIES = 16
"""The number of bodies of the largest size that fit in memory at once."""


class Bodies:
    """The bodies that are being read or decoded."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._held = 0

    @contextlib.asynccontextmanager
    async def read(self, request: Request, max_bytes: int | None = None) -> AsyncIterator[bytes]:
        """Read the whole body and yield it. It counts against the memory limit until the block ends.

        `max_bytes` lowers the limit for a body that is decoded in the event loop. Raises `ApiError`: 413 if
        the body is too large, 503 if all bodies together are, 408 if it is late. Raises `ClientDisconnect`.
        """
        parts: list[bytes] = []
        try:
            most = self._max_bytes if max_bytes is None else min(max_bytes, self._max_bytes)
            await self._read_in_time(request, parts, most)
            yield b"".join(parts)
        finally:
            self._held -= sum(map(len, parts))

    async def _read_in_time(self, request: Request, parts: list[bytes], most: int) -> None:
        try:
            async with asyncio.timeout(BODY_TIMEOUT_S) as limit:
                await self._read(request, parts, most, limit)
        except TimeoutError:
            rate = f"and a second more for each {MIN_BYTES_PER_S} bytes"
            raise ApiError(408, f"the body did not come within {BODY_TIMEOUT_S:g} s, {rate}") from None

    async def _read(self, request: Request, parts: list[bytes], most: int, limit: asyncio.Timeout) -> None:
        """Append the received chunks to `parts`."""
        if int(request.headers.get("content-length", 0)) > most:
            raise self._too_large(most)
        received = 0
        async for part in request.stream():
            received += len(part)
            if received > most:
                raise self._too_large(most)
            if self._held + len(part) > MAX_BODIES * self._max_bytes:
                raise ApiError(503, "too many request bodies at once", retry_after_s=1.0)
            parts.append(part)
            self._held += len(part)
            limit.reschedule((limit.when() or 0.0) + len(part) / MIN_BYTES_PER_S)

    def _too_large(self, most: int) -> ApiError:
        flag = " (--max-body-bytes)" if most == self._max_bytes else ""
        return ApiError(413, f"the body exceeds the limit of {most} bytes{flag}")
