"""The load generator's client against real servers that stream, refuse and close connections early."""

import asyncio
import json
import resource
import time

import pytest

from bench.peers.vllm_proxy import LAST_CHUNK, chunk, head
from bench.serve.client import Client, EventStream, Record, ServerTarget
from bench.serve.http import Endpoint, HttpError, exchange
from bench.serve.runner import drive, run_load
from bench.serve.workload import LoadRequest

REQUEST = LoadRequest([20, 21, 22], output_len=4)


def event(fields: dict) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


def token(text: str, finish: str | None = None) -> bytes:
    return event({"choices": [{"index": 0, "text": text, "finish_reason": finish}]})


USAGE = event({"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 4}})
DONE = b"data: [DONE]\n\n"


async def stream(writer: asyncio.StreamWriter, pieces: list[bytes], pause: float = 0.0) -> None:
    writer.write(head(200, None, "text/event-stream"))
    for piece in pieces:
        writer.write(chunk(piece))
        await writer.drain()
        await asyncio.sleep(pause)
    writer.write(LAST_CHUNK)


def client(url: str, **fields) -> Client:
    return Client(ServerTarget(url, "m", **fields))


async def test_request_and_record(start_server):
    seen = []

    async def serve(request, writer):
        seen.append(request)
        await stream(writer, [token("a"), token(""), token("b"), token("c", "length"), USAGE, DONE], 0.01)

    target = {"ignore_eos": True, "temperature": 0.5, "api_key": "k", "extra_body": {"priority": 2}}
    record = await client(await start_server(serve), **target).send(REQUEST)
    assert record.error == ""
    assert (record.prompt_tokens, record.output_tokens, len(record.token_times)) == (3, 4, 4)
    times = [record.start, *record.token_times, record.end]
    assert times == sorted(times)
    assert seen[0].path == "/v1/completions"
    assert seen[0].headers["authorization"] == "Bearer k"
    assert json.loads(seen[0].body) == {
        "model": "m",
        "prompt": [20, 21, 22],
        "max_tokens": 4,
        "temperature": 0.5,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
        "priority": 2,
    }


def test_each_piece_is_timed_when_it_arrives():
    record = Record()
    stream_of_events = EventStream(record)
    for pause in (0.0, 0.02, 0.01):
        time.sleep(pause)
        stream_of_events.feed(token("a"))
    first, second, third = record.token_times
    assert second - first >= 0.02 and third - second >= 0.01


WHOLE = token("ä") + b": ping\n\n" + token("b", "length").replace(b"\n\n", b"\r\n\r\n") + USAGE + DONE
BEGUN = head(200, None, "text/event-stream")
ONE = event({"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 1}})
QUEUE_FULL = b'{"error": {"message": "queue full"}}'


def streamed(*pieces: bytes) -> list[bytes]:
    return [BEGUN, *map(chunk, pieces), LAST_CHUNK]


@pytest.mark.parametrize(
    ("written", "told"),
    [
        (streamed(token("a"), token("b"), token("", "stop")), ("", 2, 2, "")),
        (streamed(*(WHOLE[i : i + 1] for i in range(len(WHOLE)))), ("", 4, 2, "")),
        (streamed(token("", "length"), ONE, DONE), ("", 1, 1, "")),
        (streamed(event({"x": {}, "choices": [{"text": "a", "token_ids": [1]}]}), DONE), ("", 1, 1, "")),
        (streamed(DONE), ("no tokens", 0, 0, "")),
        ([head(429, len(QUEUE_FULL)), QUEUE_FULL], ("HTTP 429", 0, 0, "queue full")),
        (
            streamed(token("a"), event({"error": {"message": "it died"}}), DONE),
            ("error event", 1, 1, "it died"),
        ),
        ([BEGUN, chunk(token("a")), chunk(token("b"))[:-9]], ("broken stream", 1, 1, "early")),
        ([BEGUN, chunk(token("a"))], ("broken stream", 1, 1, "early")),
        (streamed(token("a")), ("broken stream", 1, 1, "")),
        ([BEGUN, b"zz\r\n"], ("broken stream", 0, 0, "")),
        (streamed(token("a"), b"data: {oops\n\n"), ("bad event", 1, 1, "")),
    ],
)
async def test_answers_of_all_kinds(start_server, written, told):
    """They tell an error, the tokens by usage or by pieces, the pieces, and a detail of the error."""

    async def serve(_, writer):
        for piece in written:
            writer.write(piece)
            await writer.drain()

    record = await client(await start_server(serve)).send(REQUEST)
    error, tokens, pieces, detail = told
    assert (record.error, len(record.token_times)) == (error, pieces)
    assert error or record.output_tokens == tokens
    assert detail in record.detail and bool(record.detail) == bool(error)


async def test_chat(start_server):
    bodies = []

    def delta(**fields):
        return event({"choices": [{"index": 0, "delta": fields}]})

    async def serve(request, writer):
        bodies.append((request.path, json.loads(request.body)["messages"]))
        await stream(
            writer, [delta(role="assistant", content=""), delta(content="x"), delta(content="y"), DONE]
        )

    record = await client(await start_server(serve), chat=True).send(LoadRequest("hi", 4))
    assert (record.error, record.output_tokens) == ("", 2)
    assert bodies == [("/v1/chat/completions", [{"role": "user", "content": "hi"}])]


async def fetch(url: str) -> tuple[int, bytes]:
    endpoint = Endpoint.parse(url)
    body = bytearray()
    status = await exchange(endpoint, endpoint.request("GET"), lambda _, data: body.extend(data))
    return status, bytes(body)


async def test_a_body_without_length_ends_with_its_connection(start_server):
    async def serve(_, writer):
        writer.write(b"HTTP/1.1 200 OK\r\n\r\nall of it")

    assert await fetch(await start_server(serve)) == (200, b"all of it")


@pytest.mark.parametrize(
    "answer",
    [
        head(200, None) + chunk(b"part"),
        head(200, None) + chunk(b"part")[:-3],
        head(200, 10) + b"part",
        b"HTTP/1.1 200 OK\r\ncontent-",
        b"SSH-2.0-nothing\r\n\r\n",
        b"",
    ],
)
async def test_a_cut_response_is_an_error(start_server, answer):
    async def serve(_, writer):
        writer.write(answer)

    with pytest.raises(HttpError):
        await fetch(await start_server(serve))


async def test_timeout(start_server):
    async def serve(request, writer):
        await asyncio.sleep(30)

    started = time.monotonic()
    record = await client(await start_server(serve), timeout=0.1).send(REQUEST)
    assert record.error == "timeout"
    assert time.monotonic() - started < 20


async def test_concurrency_is_bounded_and_arrivals_are_kept(start_server):
    running = peak = 0

    async def serve(_, writer):
        nonlocal running, peak
        running += 1
        peak = max(peak, running)
        await stream(writer, [token("a"), USAGE, DONE], 0.01)
        running -= 1

    url = await start_server(serve)
    done = []
    records = await drive(client(url), [REQUEST] * 12, max_concurrency=3, on_done=done.append)
    assert len(done) == 12 and all(r.error == "" for r in records)
    assert peak == 3
    timed = [LoadRequest([20], 1, arrival=0.05 * i) for i in range(4)]
    records = await drive(client(url), timed)
    offsets = [record.start - records[0].start for record in records]
    assert all(offset >= 0.05 * i - 0.01 for i, offset in enumerate(offsets))


async def test_the_limit_of_open_files_is_raised_for_the_connections(start_server, monkeypatch):
    async def serve(_, writer):
        await stream(writer, [token("a"), USAGE, DONE], 0.0)

    url, limits = await start_server(serve), {"soft": 8, "hard": 70}
    monkeypatch.setattr(resource, "getrlimit", lambda _: tuple(limits.values()))
    monkeypatch.setattr(resource, "setrlimit", lambda _, both: limits.update(soft=both[0]))
    for at_once, raised in ((2, 66), (8, 70)):
        await drive(client(url), [REQUEST] * 8, max_concurrency=at_once)
        assert limits["soft"] == raised


async def test_run_load_fails_when_the_warm_up_does(start_server):
    async def serve(_, writer):
        writer.write(head(503, 0))

    target = ServerTarget(await start_server(serve), "m")
    with pytest.raises(RuntimeError, match="HTTP 503"):
        await asyncio.to_thread(run_load, target, [REQUEST], warmups=[REQUEST])


async def test_a_chunked_body_may_come_in_any_pieces(start_server):
    payload = [b"data: x\n\n", b"y" * 300, b"0\r\n\r\n"]
    wire = head(200, None) + chunk(payload[0]) + b"12c;ext=1\r\n" + payload[1] + b"\r\n" + chunk(payload[2])
    wire += LAST_CHUNK
    for size in (3, 7, 1000):

        async def serve(_, writer, size=size):
            for start in range(0, len(wire), size):
                writer.write(wire[start : start + size])
                await writer.drain()
                await asyncio.sleep(0)

        assert await fetch(await start_server(serve)) == (200, b"".join(payload))
