"""Starts small real HTTP servers for the load generator and the proxy."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from bench.peers.vllm_proxy import ReceivedRequest, read_request

Handler = Callable[[ReceivedRequest, asyncio.StreamWriter], Awaitable[None]]
StartServer = Callable[[Handler], Awaitable[str]]


@pytest.fixture
async def start_server() -> AsyncIterator[StartServer]:
    """Return a function that serves a handler on a free port and returns the base URL."""
    servers: list[asyncio.Server] = []

    async def start(handler: Handler) -> str:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                await handler(await read_request(reader), writer)
                await writer.drain()
            except ConnectionError:
                pass
            finally:
                writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        servers.append(server)
        return f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"

    yield start
    for server in servers:
        server.close()
        await server.wait_closed()
