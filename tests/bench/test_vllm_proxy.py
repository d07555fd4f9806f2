"""The proxy for a disaggregated vLLM, between two small servers that behave like vLLM's."""

import asyncio
import json

import pytest

from bench.peers.vllm_proxy import LAST_CHUNK, Proxy, chunk, head, prefill_fields
from bench.serve.client import Client, Record, ServerTarget
from bench.serve.http import Endpoint, exchange
from bench.serve.workload import LoadRequest

HANDED = {"do_remote_prefill": True, "remote_block_ids": [[3, 4]], "remote_engine_id": "p", "remote_port": 5}


def answer(writer: asyncio.StreamWriter, fields: dict, status: int = 200) -> None:
    body = json.dumps(fields).encode()
    writer.write(head(status, len(body)) + body)


class Upstream:
    """A server that records its requests."""

    def __init__(self, reply) -> None:
        self.requests: list = []
        self._reply = reply

    async def __call__(self, request, writer) -> None:
        if request.method == "GET":
            answer(writer, {"path": request.path})
            return
        self.requests.append((request, json.loads(request.body)))
        await self._reply(writer)


async def prefill_reply(writer):
    answer(writer, {"choices": [{"text": "x"}], "kv_transfer_params": HANDED})


async def decode_reply(writer):
    writer.write(head(200, None, "text/event-stream"))
    for text in "abc":
        writer.write(chunk(b'data: {"choices": [{"text": "%b"}]}\n\n' % text.encode()))
        await writer.drain()
    usage = {"choices": [], "usage": {"prompt_tokens": 2, "completion_tokens": 3}}
    writer.write(chunk(b"data: " + json.dumps(usage).encode() + b"\n\ndata: [DONE]\n\n") + LAST_CHUNK)


@pytest.fixture
def join(start_server):
    """Return a function that starts a proxy between two upstreams and returns its URL."""

    async def start(prefill: Upstream, decode: Upstream) -> str:
        proxy = Proxy(await start_server(prefill), await start_server(decode))
        server = await asyncio.start_server(proxy.handle, "127.0.0.1", 0)
        servers.append(server)
        return f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"

    servers: list[asyncio.Server] = []
    yield start
    for server in servers:
        server.close()


async def sent(url: str, **options) -> Record:
    return await Client(ServerTarget(url, "m", **options)).send(LoadRequest([7, 8], 3))


async def test_prefill_then_decode_with_the_handed_parameters(join):
    prefill, decode = Upstream(prefill_reply), Upstream(decode_reply)
    record = await sent(await join(prefill, decode), ignore_eos=True, api_key="k")
    assert (record.error, record.output_tokens, len(record.token_times)) == ("", 3, 3)

    ((first, asked_prefill),) = prefill.requests
    assert asked_prefill["max_tokens"] == 1
    assert asked_prefill["stream"] is False and "stream_options" not in asked_prefill
    assert asked_prefill["kv_transfer_params"] == {"do_remote_decode": True, "do_remote_prefill": False}
    assert asked_prefill["prompt"] == [7, 8]
    ((second, asked_decode),) = decode.requests
    assert asked_decode["kv_transfer_params"] == HANDED
    assert asked_decode["max_tokens"] == 3 and asked_decode["stream"] is True
    assert first.headers["authorization"] == second.headers["authorization"] == "Bearer k"


def test_prefill_drops_what_only_the_decode_needs():
    fields = {"prompt": "p", "stream": True, "min_tokens": 4, "max_completion_tokens": 9, "temperature": 0}
    kept = prefill_fields(fields)
    assert set(kept) == {"prompt", "temperature", "max_tokens", "stream", "kv_transfer_params"}
    assert fields["stream"] is True


async def test_refusal_of_the_prefill_reaches_the_client_and_not_the_decode(join):
    async def refuse(writer):
        answer(writer, {"error": {"message": "prompt too long"}}, status=400)

    decode = Upstream(decode_reply)
    record = await sent(await join(Upstream(refuse), decode))
    assert record.error == "HTTP 400" and "prompt too long" in record.detail
    assert decode.requests == []


async def test_prefill_without_parameters_is_an_error(join):
    async def forget(writer):
        answer(writer, {"choices": []})

    record = await sent(await join(Upstream(forget), Upstream(decode_reply)))
    assert record.error == "HTTP 502" and "kv_transfer_params" in record.detail


async def test_a_decode_that_dies_shows_as_a_broken_stream(join):
    async def die(writer):
        writer.write(head(200, None, "text/event-stream") + chunk(b'data: {"choices": [{"text": "a"}]}\n\n'))
        await writer.drain()

    record = await sent(await join(Upstream(prefill_reply), Upstream(die)))
    assert record.error == "broken stream" and "closed early" in record.detail
    assert len(record.token_times) == 1


async def test_hanging_up_cancels_the_decode(join):
    gone = asyncio.Event()

    async def endless(writer):
        writer.write(head(200, None, "text/event-stream"))
        try:
            while True:
                writer.write(chunk(b'data: {"choices": [{"text": "a"}]}\n\n'))
                await writer.drain()
                await asyncio.sleep(0.005)
        finally:
            gone.set()

    url = await join(Upstream(prefill_reply), Upstream(endless))
    record = await sent(url, timeout=1.5)
    assert record.error == "timeout" and record.token_times
    await asyncio.wait_for(gone.wait(), 20)


async def test_health_and_models(join):
    url = await join(Upstream(prefill_reply), Upstream(decode_reply))
    for path, expected in (("/health", b""), ("/v1/models", b'{"path": "/v1/models"}')):
        endpoint = Endpoint.parse(url + path)
        body = bytearray()
        status = await exchange(
            endpoint, endpoint.request("GET"), lambda _, data, body=body: body.extend(data)
        )
        assert (status, bytes(body)) == (200, expected)


async def test_health_fails_while_an_upstream_is_down(start_server, unused_tcp_port):
    proxy = Proxy(await start_server(Upstream(prefill_reply)), f"http://127.0.0.1:{unused_tcp_port}")
    server = await asyncio.start_server(proxy.handle, "127.0.0.1", 0)
    async with server:
        endpoint = Endpoint.parse(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/health")
        assert await exchange(endpoint, endpoint.request("GET"), lambda *_: None) == 502


async def test_malformed_request(join):
    url = await join(Upstream(prefill_reply), Upstream(decode_reply))
    endpoint = Endpoint.parse(url + "/v1/completions")
    assert await exchange(endpoint, endpoint.request("POST", b"{oops"), lambda *_: None) == 400
    assert await exchange(endpoint, b"nonsense\r\n\r\n", lambda *_: None) == 502
