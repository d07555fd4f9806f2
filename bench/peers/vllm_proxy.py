"""A proxy in front of one vLLM prefill and one vLLM decode server joined by the NixlConnector.

It sends each request to the prefill server for one token, with `kv_transfer_params.do_remote_decode`, and
sends the returned parameters to the decode server, whose stream it passes on. It does little work, so as not
to slow vLLM down: bytes are passed on as they arrive, and only the prefill server's answer is parsed.
"""

import asyncio
import json
from collections.abc import Awaitable
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from bench.serve.http import Endpoint, HttpError, exchange
from bench.serve.runner import run_on_fast_loop

MAX_HEAD_BYTES = 64 * 1024

# Fields that the prefill server must not get: it generates one token and does not stream.
_DECODE_ONLY = ("stream", "stream_options", "min_tokens", "max_completion_tokens")


# The headers that the proxy passes on to the servers.
_PASSED_ON = ("authorization", "x-request-id")


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


class UpstreamError(Exception):
    """A server rejected a request; carries its status and body."""

    def __init__(self, status: int, body: bytes) -> None:
        super().__init__(f"upstream answered {status}")
        self.status = status
        self.body = body


class Proxy:
    """Joins one prefill and one decode server, given by their base URLs."""

    def __init__(self, prefill_url: str, decode_url: str) -> None:
        self._prefill_url = prefill_url.rstrip("/")
        self._decode_url = decode_url.rstrip("/")

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection: one request, then close."""
        try:
            incoming = await read_request(reader)
            await _while_connected(reader, self._answer(incoming, writer))
        except UpstreamError as error:
            writer.write(head(error.status, len(error.body)) + error.body)
        except (HttpError, OSError) as error:
            body = json.dumps({"error": {"message": str(error), "type": "proxy_error"}}).encode()
            writer.write(head(502, len(body)) + body)
        finally:
            writer.close()

    async def _answer(self, incoming: ReceivedRequest, writer: asyncio.StreamWriter) -> None:
        if incoming.method == "GET" and incoming.path == "/health":
            for url in (self._prefill_url, self._decode_url):
                await _fetch(url, incoming)
            writer.write(head(200, 0))
        elif incoming.method == "GET":
            body = await _fetch(self._decode_url, incoming)
            writer.write(head(200, len(body)) + body)
        else:
            await self._generate(incoming, writer)

    async def _generate(self, incoming: ReceivedRequest, writer: asyncio.StreamWriter) -> None:
        try:
            fields = json.loads(incoming.body)
        except ValueError as error:
            raise UpstreamError(400, json.dumps({"error": {"message": str(error)}}).encode()) from error
        answer = await _fetch(self._prefill_url, incoming, prefill_fields(fields))
        handed = json.loads(answer).get("kv_transfer_params")
        if not handed:
            raise HttpError("the prefill server returned no kv_transfer_params")
        content_type = "text/event-stream" if fields.get("stream") else "application/json"
        started = False

        def pass_on(status: int, data: bytes) -> None:
            nonlocal started
            if not started:
                started = True
                writer.write(head(status, None, content_type))
            writer.write(chunk(data))

        endpoint = Endpoint.parse(self._decode_url + incoming.path)
        body = json.dumps(fields | {"kv_transfer_params": handed}).encode()
        try:
            await exchange(endpoint, endpoint.request("POST", body, _passed_on(incoming)), pass_on)
        except HttpError:
            if not started:
                raise
            return  # a stream without its last chunk tells the client that it was cut
        writer.write(LAST_CHUNK)


def prefill_fields(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the request for the prefill server: one token, and its KV kept for a remote decode."""
    kept = {name: value for name, value in fields.items() if name not in _DECODE_ONLY}
    return kept | {
        "max_tokens": 1,
        "stream": False,
        "kv_transfer_params": {"do_remote_decode": True, "do_remote_prefill": False},
    }


def _passed_on(incoming: ReceivedRequest) -> dict[str, str]:
    return {name: incoming.headers[name] for name in _PASSED_ON if name in incoming.headers}


async def _while_connected(reader: asyncio.StreamReader, work: Awaitable[None]) -> None:
    """Run `work`, and cancel it when the client hangs up."""
    task = asyncio.ensure_future(work)
    hang_up = asyncio.ensure_future(reader.read())
    try:
        await asyncio.wait({task, hang_up}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            task.result()
    finally:
        task.cancel()
        hang_up.cancel()
        await asyncio.gather(task, hang_up, return_exceptions=True)


async def _fetch(base_url: str, incoming: ReceivedRequest, fields: dict[str, Any] | None = None) -> bytes:
    """Return a whole response body from a server. Raises UpstreamError unless its status is 200."""
    endpoint = Endpoint.parse(base_url + incoming.path)
    body = b"" if fields is None else json.dumps(fields).encode()
    answer = bytearray()
    status = await exchange(
        endpoint,
        endpoint.request(incoming.method, body, _passed_on(incoming)),
        lambda _, data: answer.extend(data),
    )
    if status != 200:
        raise UpstreamError(status, bytes(answer))
    return bytes(answer)


async def serve(prefill_url: str, decode_url: str, host: str, port: int) -> None:
    """Run the proxy until cancelled."""
    proxy = Proxy(prefill_url, decode_url)
    server = await asyncio.start_server(proxy.handle, host, port, limit=MAX_HEAD_BYTES)
    async with server:
        await server.serve_forever()


def main(
    prefill: Annotated[str, typer.Option(help="base URL of the prefill server")],
    decode: Annotated[str, typer.Option(help="base URL of the decode server")],
    host: Annotated[str, typer.Option()] = "127.0.0.1",
    port: Annotated[int, typer.Option()] = 8000,
) -> None:
    """Serve one prefill and one decode server as one."""
    run_on_fast_loop(serve(prefill, decode, host, port))


if __name__ == "__main__":
    typer.run(main)
