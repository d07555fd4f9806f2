"""The parts of an HTTP/1.1 server that the peers' front ends need, with the standard library only."""

import asyncio
from dataclasses import dataclass

from bench.serve.http import HttpError

LAST_CHUNK = b"0\r\n\r\n"


@dataclass(frozen=True, slots=True)
class ReceivedRequest:
    """A received request; header names are in lower case."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes


async def read_request(reader: asyncio.StreamReader) -> ReceivedRequest:
    """Read one request with a Content-Length. Raises HttpError if it is malformed or cut short."""
    try:
        text = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        request_line, *lines = text.strip().split("\r\n")
        method, path, _ = request_line.split(" ", 2)
        pairs = (line.partition(":") for line in lines)
        headers = {name.strip().lower(): value.strip() for name, _, value in pairs}
        body = await reader.readexactly(int(headers.get("content-length", "0")))
    except (asyncio.IncompleteReadError, asyncio.LimitOverrunError, ValueError) as error:
        raise HttpError(f"malformed request: {error}") from error
    return ReceivedRequest(method, path, headers, body)


def head(status: int, length: int | None, content_type: str = "application/json") -> bytes:
    """Return the head of a response; without a length the body is chunked."""
    framing = "transfer-encoding: chunked" if length is None else f"content-length: {length}"
    return (
        f"HTTP/1.1 {status} \r\ncontent-type: {content_type}\r\n{framing}\r\nconnection: close\r\n\r\n"
    ).encode()


def chunk(data: bytes) -> bytes:
    """Encode one chunk of a chunked body."""
    return b"%x\r\n%b\r\n" % (len(data), data)
