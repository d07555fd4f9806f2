"""Sends a generation's answer: whole, or as server-sent events."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Iterator
from itertools import chain

from starlette.types import Message, Send

from router.answers.formats import AnswerWriter, StreamedAnswer
from router.connection import DirectWriter
from router.observe.timing import response_timing
from router.requests.journal import Generation
from router.requests.slices import Slices

PART_BYTES = 64 * 1024
"""A shorter answer has its length in its head."""
_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class AnswerSender:
    """Sends one answer. What is long goes out in parts while it is written, until the client `is_gone`."""

    def __init__(self, send: Send, slices: Slices, with_timing: bool, is_gone: Callable[[], bool]) -> None:
        self._send = send
        self._slices = slices
        self._with_timing = with_timing
        self._is_gone = is_gone
        self._start: Message | None = None
        """The answer's head, until the first part is sent."""

    async def whole(self, generation: Generation, answer: AnswerWriter) -> None:
        """JSON, once the generation is over."""
        headers = [(b"content-type", b"application/json")]
        if (error := generation.error) is not None:
            headers += [(name.encode(), value.encode()) for name, value in error.headers.items()]
            self._start = _start(error.status, headers)
            await self._put(answer.failed(generation.choices, error), is_last=True)
            return
        self._start = _start(200, headers)
        timing = response_timing(generation) if self._with_timing else None
        await self._put(answer.response(generation.choices, timing), is_last=True, keep=answer.keep)

    async def stream(
        self, generation: Generation, answer: StreamedAnswer, direct: DirectWriter | None
    ) -> None:
        """Server-sent events, from the first news on. `send` waits while the client doesn't read."""
        await self._send(_start(200, list(_STREAM_HEADERS)))
        write = None if direct is None else _writer(generation, answer, direct)
        while not generation.is_over:
            await self._put(_news(generation, answer))
            await generation.wait(write)
        if generation.error is not None:
            last, keep = answer.failure(generation.error), None
        else:
            timing = response_timing(generation) if self._with_timing else None
            last, keep = answer.last_chunk(generation.choices, timing), answer.keep
        await self._put(chain(_news(generation, answer), last), is_last=True, keep=keep)

    async def _put(
        self,
        pieces: Iterable[bytes],
        *,
        is_last: bool = False,
        keep: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """`keep` is awaited before the client sees the end."""
        body = b""
        async for part in self._slices.of(pieces):
            if self._is_gone():
                return
            if len(body) >= PART_BYTES:
                await self._put_part(body, is_last=False)
                body = b""
            body += part
        if keep is not None:
            await keep()
        if body or is_last:
            await self._put_part(body, is_last)

    async def _put_part(self, body: bytes, is_last: bool) -> None:
        start, self._start = self._start, None
        if start is not None:
            if is_last:
                start["headers"].append((b"content-length", b"%d" % len(body)))
            await self._send(start)
        await self._send({"type": "http.response.body", "body": body, "more_body": not is_last})


def _start(status: int, headers: list[tuple[bytes, bytes]]) -> Message:
    return {"type": "http.response.start", "status": status, "headers": headers}


def _news(generation: Generation, answer: StreamedAnswer) -> Iterator[bytes]:
    """Events for what is new of all choices."""
    return (piece for choice in generation.choices if choice.has_news for piece in answer.chunk(choice))


def _writer(
    generation: Generation, answer: StreamedAnswer, direct: DirectWriter
) -> Callable[[], bool] | None:
    """Writes a single choice's events as its tokens come, without a task, while the client reads."""
    choice, *others = generation.choices

    def write() -> bool:
        if choice.finish_reason is not None or generation.error is not None or not direct.is_ready:
            return False
        if events := b"".join(answer.chunk(choice)):
            direct.write(events)
        return True

    return None if others else write
