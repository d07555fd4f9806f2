"""Fuzzes the router's ports: HTTP with bytes and with JSON in every field, and the port of workers."""

from __future__ import annotations

import json
import logging
import re
import socket
from typing import Any
from urllib.parse import urlsplit

import httpx
import msgspec
import zmq
from hypothesis import strategies as st

from messaging.sockets import connect_dealer
from protocol.codec import encode
from protocol.kv_events import KvChange, Medium
from protocol.outputs import RequestTiming, TokenOutput, TransferTiming
from protocol.speculation import MethodState, SpeculationState
from protocol.worker_to_router import AbsentRequests, KvEvents, Leaving, PairState, Prefetched, StepOutput
from router.anthropic.request import MessageBody
from router.openai_types import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from router.pooling import EmbeddingBody, RerankBody, ScoreBody
from router.responses.body import ResponseBody
from tests.fuzzing import altered, anything, damaged, fuzz, say, zmq_strangers
from tests.router.router_clients import eventually, is_idle, post


def check_all_is_well(router, caplog) -> None:
    eventually(lambda: is_idle(router))
    assert post(router, max_tokens=2).status_code == 200
    errors = [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]
    assert not [line for line in errors if "worker decode-9" not in line]  # it is refused, or lost


def test_fuzz_strangers(router, caplog):
    address = urlsplit(router.server.state.link.endpoint)

    fuzz(lambda parts: say(address.hostname, address.port, parts), zmq_strangers, examples=100)
    check_all_is_well(router, caplog)


def messages(router) -> list[bytes]:
    """Draw messages of a worker `decode-9`, beginning with its registration."""
    like = router.workers[0].register_message()
    names = {"worker_id": "decode-9", "incarnation": "x"}
    pair = PairState(peer="decode-0", transport="tcp", counters={"kv_transfer_bytes_total": 5.0})
    speculation = SpeculationState(methods=[MethodState(method="ngram", num_requests=1, acceptance=[0.5])])
    state = msgspec.structs.replace(like.state, **names, pairs=[pair], speculation=speculation)
    address = msgspec.structs.replace(like.address, **names)
    timing = RequestTiming(queue_s=0.1, transfer=TransferTiming(transport="tcp", transfer_s=0.1))
    output = TokenOutput(request_id="r", token_ids=[1], finish_reason="length", timing=timing)
    change = KvChange("stored", Medium.GPU, b"i" * 16)
    return [
        encode(msgspec.structs.replace(like, address=address, state=state)),
        encode(state),
        encode(StepOutput(**names, outputs=[output])),
        encode(KvEvents(**names, sequence=0, changes=[change])),
        encode(AbsentRequests(**names, request_ids=["r"])),
        encode(Leaving(**names)),
        encode(Prefetched(**names, request_id="r", complete=True)),
    ]


def test_fuzz_a_member(router, caplog):
    """A worker's messages affect only its own requests, and never the operators' pages."""
    caplog.set_level(logging.ERROR)  # do not keep a line for each
    sent = 0

    def check(raw: bytes) -> None:
        nonlocal sent
        dealer.send(raw)
        sent += 1
        if sent % 50 == 0:
            looks_well()

    def dropped(reason: str = "malformed") -> float:
        return router.metric("tandem_messages_dropped_total", reason=reason)

    def looks_well() -> None:
        for path in ("/metrics", "/workers", "/cluster"):
            assert router.http.get(path).status_code == 200

    before, failed = dropped(), dropped("failed")
    whole = messages(router)
    with (
        zmq.Context() as context,
        connect_dealer(context, router.keys, router.server.state.link.endpoint, "decode-9") as dealer,
    ):
        dealer.send(whole[0])
        eventually(lambda: "decode-9" in router.http.get("/workers").text)
        fuzz(check, damaged(whole) | altered(whole), examples=400)
        eventually(lambda: dropped() - before > sent / 10)
        looks_well()
        before = dropped()
        dealer.send(encode(Leaving(worker_id="decode-0", incarnation=router.workers[0].incarnation)))
        dealer.send_multipart((whole[0], whole[0]))
        eventually(lambda: dropped() == before + 2)
    assert dropped("failed") == failed
    if (known := router.server.state.registry.current_of("decode-9")) is not None:
        router.server.mark_dead(*known.key, "its test is over")
    check_all_is_well(router, caplog)


BODIES: dict[str, tuple[Any, dict[str, Any]]] = {
    "/v1/completions": (CompletionBody, {"prompt": "hello", "max_tokens": 2}),
    "/v1/chat/completions": (ChatBody, {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2}),
    "/v1/responses": (ResponseBody, {"input": "x", "max_output_tokens": 2}),
    "/v1/messages": (MessageBody, {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2}),
    "/v1/messages/count_tokens": (MessageBody, {"messages": [{"role": "user", "content": "x"}]}),
    "/v1/embeddings": (EmbeddingBody, {"input": "x"}),
    "/score": (ScoreBody, {"text_1": "x", "text_2": ["y"]}),
    "/v1/rerank": (RerankBody, {"query": "x", "documents": ["y"]}),
    "/tokenize": (TokenizeBody, {"prompt": "hello"}),
    "/detokenize": (DetokenizeBody, {"tokens": [5]}),
}
STATUS = re.compile(rb"^HTTP/1\.1 (\d+) ", re.MULTILINE)


def posted(path: str, body: bytes, extra: bytes = b"") -> bytes:
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n".encode()
    return head + extra + b"\r\n" + body


REQUESTS = [
    b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n",
    b"GET /v1/models HTTP/1.0\r\n\r\n",
    b"GET /workers HTTP/1.1\r\nhost: localhost\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n",
    b"HEAD / HTTP/1.1\r\nhost: localhost\r\naccept: text/html\r\n\r\n" * 2,
    b'POST /tokenize HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n5\r\n{"pro\r\n0\r\n\r\n',
    *(posted(path, json.dumps(body).encode()) for path, (_, body) in BODIES.items()),
    posted(
        "/v1/completions",
        b'{"prompt": "x", "stream": true}',
        b"x-slo-ttft-ms: 10\r\nexpect: 100-continue\r\n",
    ),
]


def talk(router, raw: bytes) -> bytes:
    """Send bytes, wait a moment for an answer, close our side, and read the rest."""
    with socket.create_connection(("127.0.0.1", router.server.port), timeout=10) as client:
        received = b""
        try:
            client.sendall(raw)
            client.settimeout(0.02)
            received += client.recv(1 << 16)
        except TimeoutError:
            pass
        except OSError:
            return received
        try:
            client.settimeout(10)
            client.shutdown(socket.SHUT_WR)
            while part := client.recv(1 << 16):
                received += part
        except ConnectionError:
            pass
        return received


def http_is_well(router) -> None:
    eventually(lambda: is_idle(router))
    eventually(lambda: len(router.server._server.server_state.connections) <= 1)
    for family in router.server.state.metrics.registry.collect():
        for sample in family.samples:
            if sample.name == "tandem_http_responses_total":
                assert int(sample.labels["status"]) < 500, sample
    answer = router.http.post("/v1/completions", json={"prompt": "hello", "max_tokens": 2})
    assert answer.status_code == 200


def test_any_bytes(router) -> None:
    def check(raw: bytes) -> None:
        statuses = [int(status) for status in STATUS.findall(talk(router, raw))]
        assert all(100 <= status < 500 for status in statuses), statuses

    fuzz(check, damaged(REQUESTS) | st.binary(max_size=300), examples=60)
    http_is_well(router)


def check_error(answer: httpx.Response) -> None:
    """Check that the error has OpenAI's shape, fits its status, and is short whatever it quotes."""
    error = answer.json()["error"]
    assert list(error) == ["message", "type", "param", "code"]
    assert error["type"] == {404: "not_found_error"}.get(answer.status_code, "invalid_request_error")
    assert error["code"]
    assert 0 < len(error["message"]) < 1100 and len(error["param"] or "") < 1100


def test_quotes_of_a_request_in_errors_are_cut(router) -> None:
    for fields in ({"model": "x" * 3000}, {"speculative": {"x" * 3000: 1}}):
        check_error(router.http.post("/v1/completions", json={"prompt": "hello", **fields}))


@st.composite
def bodies(draw: st.DrawFn) -> tuple[str, dict[str, Any]]:
    path = draw(st.sampled_from(sorted(BODIES)))
    kind, body = BODIES[path]
    fields = draw(st.lists(st.sampled_from(kind.__struct_fields__), min_size=1, max_size=3))
    return path, {**body, **{field: draw(anything) for field in fields}}


def test_any_value_in_any_field(router) -> None:
    def check(example: tuple[str, dict[str, Any]]) -> None:
        path, body = example
        raw = json.dumps(body).encode("utf-8", "surrogatepass")
        answer = router.http.post(path, content=raw)
        assert answer.status_code < 500, answer.text
        if answer.status_code != 200:
            check_error(answer)

    fuzz(check, bodies(), examples=150)
    http_is_well(router)
