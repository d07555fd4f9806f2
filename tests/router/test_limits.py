"""Limits on what clients send, and on how slowly they send and read."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable

import pytest

from router.connection import HEAD_TIMEOUT_S, UNREAD_TIMEOUT_S
from router.decoding import BODY_TIMEOUT_S
from router.preprocessing.requests import FAST_INLINE_BYTES, INLINE_OBJECTS
from tests.router.router_clients import eventually

MB = 1_000_000
USER = b'{"role":"user","content":"x"}'
HOSTILE = {
    "lists": ("/v1/completions", lambda: b'{"prompt":[' + b",".join([b"[1]"] * MB) + b"]}"),
    "lists after a text": ("/v1/completions", lambda: b'{"prompt":["a",' + b",".join([b"[1]"] * MB) + b"]}"),
    "texts": ("/v1/completions", lambda: b'{"prompt":[' + b",".join([b'"a"'] * MB) + b"]}"),
    "token ids": ("/detokenize", lambda: b'{"tokens":[' + b",".join([b"1"] * 2 * MB) + b"]}"),
    "template variables": (
        "/v1/chat/completions",
        lambda: (
            b'{"messages":[%b],"chat_template_kwargs":{' % USER
            + b",".join(b'"k%d":1' % i for i in range(MB // 4))
            + b"}}"
        ),
    ),
    "tools": (
        "/v1/chat/completions",
        lambda: b'{"messages":[%b],"tools":[' % USER + b",".join([b"[]"] * (5 * MB // 4)) + b"]}",
    ),
    "messages": ("/v1/chat/completions", lambda: b'{"messages":[' + b",".join([USER] * 120_000) + b"]}"),
}
"""Hostile bodies of 4 MB, made on demand."""


@pytest.mark.parametrize("hostile", HOSTILE.values(), ids=HOSTILE)
def test_a_large_body_does_not_hold_up_the_event_loop(router, hostile):
    """Neither in the loop's thread nor, by holding Python's lock, in another one."""
    path, make_body = hostile
    body = make_body()
    clock = time.pthread_getcpuclockid(router.thread.ident)
    before, of_all = time.clock_gettime(clock), time.process_time()
    answer = router.http.post(path, content=body)
    in_loop, of_all = time.clock_gettime(clock) - before, time.process_time() - of_all
    assert answer.status_code == 400
    assert in_loop < 0.1
    assert of_all < 0.4


BODIES = {
    "small": (b'{"prompt": "x", "max_tokens": 1}', False),
    "large": (b'{"prompt": "%b", "max_tokens": 1}' % (b"x " * FAST_INLINE_BYTES), True),
    "many objects": (
        b'{"prompt": "x", "max_tokens": 1, "other": [%b]}' % b",".join([b"{}"] * (INLINE_OBJECTS + 1)),
        True,
    ),
}


@pytest.mark.parametrize(("body", "leaves"), BODIES.values(), ids=BODIES)
def test_a_body_that_takes_long_to_parse_is_parsed_in_the_preprocessor(router, monkeypatch, body, leaves):
    preprocessor, tasks = router.server.state.preprocessor, []
    run = preprocessor.run

    def noting(call, argument):
        tasks.append(call.task)
        return run(call, argument)

    monkeypatch.setattr(preprocessor, "run", noting)
    assert router.http.post("/v1/completions", content=body).status_code in (200, 400)
    assert tasks == ["completion"] * leaves


def test_bodies_parsed_here_and_in_the_preprocessor_give_the_same_request(router, monkeypatch):
    """Prompts, sampling, options and adapters come back unchanged."""
    fields = {"max_tokens": 3, "n": 2, "seed": 5, "stop": ["zz"], "logit_bias": {"7": 1.5}, "echo": True}
    fields |= {"bad_words": ["quick"], "allowed_token_ids": list(range(300)), "logprobs": 1}
    requests = {
        "/v1/completions": {"prompt": ["the quick brown fox", "jumps"], **fields},
        "/v1/chat/completions": {
            "messages": [{"role": "user", "content": "a fox"}],
            "prediction": {"content": "a fox"},
            "seed": 5,
            "max_tokens": 3,
        },
        "/v1/responses": {"input": "a fox", "instructions": "be brief", "seed": 5, "max_output_tokens": 3},
        "/v1/messages": {
            "messages": [{"role": "user", "content": "a fox"}],
            "system": "be brief",
            "seed": 5,
            "max_tokens": 3,
        },
        "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": "a fox"}]},
        "/tokenize": {"prompt": "the quick brown fox", "return_token_strs": True},
        "/detokenize": {"tokens": [70, 71, 72]},
    }
    preparer = router.server.state.requests
    for path, body in requests.items():
        answers = []
        for inline_bytes in (FAST_INLINE_BYTES, 0):
            monkeypatch.setattr(preparer, "_inline_bytes", inline_bytes)
            answer = router.http.post(path, json=body)
            assert answer.status_code == 200, answer.text
            answers.append(_without_names(answer.json()))
        assert answers[0] == answers[1], path


def _without_names(value):
    """Remove ids and times, which differ between answers."""
    if isinstance(value, list):
        return [_without_names(each) for each in value]
    if not isinstance(value, dict):
        return value
    return {
        name: _without_names(each)
        for name, each in value.items()
        if name not in ("id", "created", "created_at", "prompt_tokens_details", "input_tokens_details")
    }


def send_part(port: int, size: int) -> socket.socket:
    client = socket.create_connection(("127.0.0.1", port), timeout=10)
    client.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % (size + 1))
    client.sendall(b" " * size)
    return client


def test_bodies_are_limited_in_sum(make_router):
    router = make_router(max_body_bytes=1000)
    router.add_worker()
    clients = [send_part(router.server.port, 990) for _ in range(17)]
    by_status = [client for client in clients if _answers(client)]
    assert len(by_status) == 1
    assert by_status[0].recv(4096).startswith(b"HTTP/1.1 503 ")
    for client in clients:
        client.close()
    body = json.dumps({"prompt": "x" * 800, "max_tokens": 1})
    eventually(lambda: router.http.post("/v1/completions", content=body).status_code == 400)


def _answers(client: socket.socket) -> bool:
    """Tell whether an answer comes soon."""
    client.settimeout(0.3)
    try:
        return bool(client.recv(1, socket.MSG_PEEK))
    except TimeoutError:
        return False


def test_sequences_are_limited_in_sum(make_router):
    """Uses the product's default limits."""
    router = make_router()
    router.add_worker().hold.set()
    limit, most = router.server.config.max_queued_requests, router.server.config.max_n
    assert (limit, most) == (4096, 128)
    body = b'{"prompt": "x", "max_tokens": 1, "stream": true, "n": %d}' % most
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body)
    clients = [socket.create_connection(("127.0.0.1", router.server.port)) for _ in range(limit // most)]
    for client in clients:
        client.sendall(head + body)
    eventually(lambda: len(router.server.state.journal) == limit)
    assert router.http.post("/v1/completions", content=body).status_code == 429
    for client in clients:
        client.close()
    eventually(lambda: not len(router.server.state.journal))


HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n"
LONGEST_S = 60.0
STREAM = {"prompt": "x", "max_tokens": 20_000, "stream": True, "return_token_ids": True, "logprobs": 20}


class Hostile(threading.Thread):
    """Sends `begun`, then `drip` twice a second until the server ends it. Records answers and times."""

    def __init__(self, port: int, begun: bytes, drip: bytes = b"", receives: bool = True) -> None:
        super().__init__(daemon=True)
        self.client = socket.socket()
        self.client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        self.client.connect(("127.0.0.1", port))
        self._begun, self._drip, self._receives = begun, drip, receives
        self.told = b""
        self.after_s = 0.0
        self.start()

    def run(self) -> None:
        started = time.monotonic()
        self.client.sendall(self._begun)
        while self._receives and not self.told and time.monotonic() - started < LONGEST_S:
            self.client.settimeout(0.5)
            try:
                self.told = self.client.recv(1 << 16) or b"closed"
            except TimeoutError:
                self.client.sendall(self._drip)
        self.after_s = time.monotonic() - started


def of_body(body: dict) -> bytes:
    raw = json.dumps(body).encode()
    return HEAD + b"content-length: %d\r\n\r\n" % len(raw) + raw


def test_slow_clients_are_disconnected_and_others_served(make_router):
    router = make_router()
    worker = router.add_worker(max_model_len=100_000, tokens_per_step=200, step_s=0.001)
    port = router.server.port
    heads = {
        "silent": Hostile(port, b""),
        "begins": Hostile(port, HEAD),
        "drips headers": Hostile(port, HEAD, b"x-a: b\r\n"),
    }
    bodies = {
        "sends no body": Hostile(port, HEAD + b"content-length: 1000\r\n\r\n"),
        "drips a body": Hostile(port, HEAD + b"content-length: 1000\r\n\r\n", b" "),
        "drips chunks": Hostile(port, HEAD + b"transfer-encoding: chunked\r\n\r\n", b"1\r\n \r\n"),
    }
    unread = [Hostile(port, of_body(STREAM), receives=False) for _ in range(2)]
    eventually(lambda: len(worker.generated) == 2)
    begun = time.monotonic()
    ended: Callable[[str], float] = lambda reason: router.metric(  # noqa: E731
        "tandem_http_connections_ended_total", reason=reason
    )
    eventually(lambda: ended("unread") == 2, timeout_s=LONGEST_S)
    assert UNREAD_TIMEOUT_S - 1 < time.monotonic() - begun < LONGEST_S
    for name, client in (heads | bodies).items():
        client.join(LONGEST_S)
        limit = HEAD_TIMEOUT_S if name in heads else BODY_TIMEOUT_S
        assert client.told.startswith(b"HTTP/1.1 408 "), (name, client.told)
        assert limit - 0.5 < client.after_s < limit + 15, (name, client.after_s)
    assert ended("late_head") == 3
    assert router.http.post("/v1/completions", json={"prompt": "x", "max_tokens": 2}).status_code == 200
    eventually(lambda: len(router.server._server.server_state.connections) == 1)
    assert not len(router.server.state.journal)
    for client in unread:
        client.client.close()
