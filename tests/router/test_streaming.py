"""Events are written as tokens come; a client that reads late gets them all."""

from __future__ import annotations

import asyncio
import json
import socket
from typing import Any

import httpx

from router.connection import DirectWriter, Outbox
from router.requests.journal import Generation
from tests.router.router_clients import BODY, emitted, eventually, post

NUM_TOKENS = 400


class Handler:
    """A handler of a generation's news. `writes` is the return value of `write`."""

    def __init__(self) -> None:
        self.generation = Generation([], arrival=0.0, timeout_s=60.0)
        self.writes = True
        self.num_writes = 0

    def write(self) -> bool:
        self.num_writes += self.writes
        return self.writes

    async def waits(self) -> asyncio.Task[None]:
        task = asyncio.ensure_future(self.generation.wait(self.write))
        await asyncio.sleep(0)
        return task


async def test_news_written_at_once_do_not_wake_the_handler():
    handler = Handler()
    task = await handler.waits()
    for _ in range(3):
        handler.generation.notify()
    await asyncio.sleep(0)
    assert handler.num_writes == 3 and not task.done()
    handler.writes = False
    handler.generation.notify()
    await asyncio.wait_for(task, 5)


async def test_nothing_overtakes_the_handlers_pending_news():
    handler = Handler()
    handler.generation.notify()  # the handler does not wait yet
    await asyncio.wait_for(handler.generation.wait(handler.write), 5)
    task = await handler.waits()
    handler.writes = False
    handler.generation.notify()
    handler.writes = True
    handler.generation.notify()  # it was woken but has not run yet
    await asyncio.wait_for(task, 5)
    handler.generation.notify()  # it writes
    assert handler.num_writes == 0
    await asyncio.wait_for(handler.generation.wait(handler.write), 5)


class Transport:
    """Appends to `written` what is written, with the transport's name."""

    def __init__(self, name: str, written: list[str]) -> None:
        self.name, self.written, self.closed = name, written, False

    def is_closing(self) -> bool:
        return self.closed

    def write(self, data: bytes) -> None:
        self.written.append(f"{self.name} {data.decode().split()[1]}")


async def test_a_steps_chunks_are_written_before_other_woken_tasks_run():
    outbox, happened = Outbox(), []
    transports: list[Any] = [Transport(name, happened) for name in ("first", "second", "gone")]
    for step in ("one", "two"):
        for transport in transports:
            DirectWriter(outbox, transport).write(step.encode())
            asyncio.get_running_loop().call_soon(happened.append, f"{transport.name} is woken")
        happened.append("all are made")
        transports[-1].closed = True  # its client left meanwhile
        await asyncio.sleep(0)
        woken = [f"{name} is woken" for name in ("first", "second", "gone")]
        assert happened == ["all are made", f"first {step}", f"second {step}", *woken]
        happened.clear()


def test_most_tokens_are_written_without_the_handler(make_router, monkeypatch):
    router = make_router()
    worker = router.add_worker(stall_after=1)
    chunks, answer = [], b""
    write = DirectWriter.write
    monkeypatch.setattr(DirectWriter, "write", lambda self, body: (chunks.append(body), write(self, body)))
    body = {**BODY, "max_tokens": 30, "stream": True}
    with router.http.stream("POST", "/v1/completions", json=body) as response:
        for data in response.iter_raw():
            answer += data
            worker.stall_after += 1  # an unread token would be written together with the next one
    assert len(chunks) >= 20
    assert b"".join(chunks) in answer


def test_a_client_that_reads_late_gets_every_token_once(make_router):
    router = make_router()
    router.add_worker()
    router.server._http_socket.setsockopt(
        socket.SOL_SOCKET, socket.SO_SNDBUF, 4096
    )  # its connections inherit this
    body = {**BODY, "max_tokens": NUM_TOKENS, "return_token_ids": True, "logprobs": 20}
    expected = post(router, **body).json()["choices"][0]["token_ids"]
    small = httpx.HTTPTransport(socket_options=[(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 14)])
    with (
        httpx.Client(transport=small, timeout=20) as client,
        client.stream("POST", f"{router.url}/v1/completions", json={**body, "stream": True}) as response,
    ):
        eventually(lambda: not emitted(router))
        lines = [line[6:] for line in response.iter_lines() if line.startswith("data: {")]
    tokens = [json.loads(line)["choices"][0]["token_ids"] for line in lines]
    assert len(tokens) < NUM_TOKENS, "the router never waited for the client"
    assert [token for step in tokens for token in step] == expected
