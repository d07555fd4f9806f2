"""What one client can take of the router: time of the event loop, memory, threads."""

from __future__ import annotations

import json
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from router_clients import eventually

from protocol.config import ServeConfig
from protocol.errors import InvalidRequestError
from router.tokenizer import FAST_INLINE_BYTES, INLINE_BYTES, PIECE_CHARACTERS, Tokenizer

MB = 1_000_000
USER = b'{"role":"user","content":"x"}'
HOSTILE = {
    "lists": ("/v1/completions", lambda: b'{"prompt":[' + b",".join([b"[1]"] * 4 * MB) + b"]}"),
    "lists after a text": (
        "/v1/completions",
        lambda: b'{"prompt":["a",' + b",".join([b"[1]"] * 4 * MB) + b"]}",
    ),
    "texts": ("/v1/completions", lambda: b'{"prompt":[' + b",".join([b'"a"'] * 4 * MB) + b"]}"),
    "token ids": ("/detokenize", lambda: b'{"tokens":[' + b",".join([b"1"] * 8 * MB) + b"]}"),
    "template variables": (
        "/v1/chat/completions",
        lambda: (
            b'{"messages":[%b],"chat_template_kwargs":{' % USER
            + b",".join(b'"k%d":1' % i for i in range(MB))
            + b"}}"
        ),
    ),
    "tools": (
        "/v1/chat/completions",
        lambda: b'{"messages":[%b],"tools":[' % USER + b",".join([b"[]"] * 5 * MB) + b"]}",
    ),
    "messages": ("/v1/chat/completions", lambda: b'{"messages":[' + b",".join([USER] * 480_000) + b"]}"),
}
"""Made when they are needed: they take a second and 100 MB."""


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
    assert in_loop < 0.4
    assert of_all < 1.5


def test_bad_words_are_tokenized_beside_the_event_loop(router, monkeypatch):
    seen = set()
    encode = router.server.state.tokenizer.encode

    def noting(*arguments, **options):
        seen.add(threading.get_ident())
        return encode(*arguments, **options)

    monkeypatch.setattr(router.server.state.tokenizer, "encode", noting)
    body = {"prompt": "x", "max_tokens": 1, "bad_words": ["some words"] * 1000}
    assert router.http.post("/v1/completions", json=body).status_code == 200
    assert seen and router.thread.ident not in seen


@pytest.mark.parametrize("is_fast", [True, False])
async def test_what_takes_no_longer_than_the_way_to_a_thread_stays_in_the_event_loop(
    model_folder, monkeypatch, is_fast
):
    tokenizer = Tokenizer.load(ServeConfig(model=str(model_folder)))
    if not is_fast:
        monkeypatch.setattr(tokenizer, "_fast_encode", None)
    limit = FAST_INLINE_BYTES if is_fast else INLINE_BYTES
    here = threading.get_ident()
    assert await tokenizer.off_loop(limit, threading.get_ident) == here
    assert await tokenizer.off_loop(limit + 1, threading.get_ident) != here
    tokenizer.close()


def test_tokenizing_runs_twice_at_once_at_most(router, monkeypatch):
    running, most = set(), []
    tokenizer = router.server.state.tokenizer

    def slow(*arguments):
        running.add(threading.get_ident())
        most.append(len(running))
        threading.Event().wait(0.05)
        running.remove(threading.get_ident())
        return [1]

    monkeypatch.setattr(tokenizer, "encode_prompt", slow)
    body = {"prompt": "x" * FAST_INLINE_BYTES}
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda _: router.http.post("/tokenize", json=body), range(8)))
    assert {answer.status_code for answer in answers} == {200}
    assert max(most) == 2


def test_a_text_of_too_many_tokens_is_never_tokenized_as_a_whole(model_folder, monkeypatch):
    tokenizer = Tokenizer.load(ServeConfig(model=str(model_folder)))
    encode, lengths = tokenizer.encode, []

    def noting(text, *arguments):
        lengths.append(len(text))
        return encode(text, *arguments)

    monkeypatch.setattr(tokenizer, "encode", noting)
    monkeypatch.setattr("router.tokenizer.SAFE_CHARACTERS_PER_TOKEN", 1)
    with pytest.raises(InvalidRequestError, match=r"prompt: it exceeds .* 300000 tokens"):
        tokenizer.encode_prompt("x" * 1_000_000, True, 300_000, "prompt")
    assert max(lengths) == PIECE_CHARACTERS
    words = "the quick " * 100_000
    assert tokenizer.encode_prompt(words, True, 500_000, "prompt") == encode(words)


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
    """Whether anything comes back soon."""
    client.settimeout(0.3)
    try:
        return bool(client.recv(1, socket.MSG_PEEK))
    except TimeoutError:
        return False


def test_a_body_over_the_limit_is_refused_however_it_is_announced(router):
    """With the product's default."""
    limit = router.server.config.max_body_bytes
    assert limit == 16 * 1024 * 1024
    with send_part(router.server.port, limit) as client:
        client.sendall(b" ")
        assert client.recv(4096).startswith(b"HTTP/1.1 413 ")
    parts = (b" " * MB for _ in range(limit // MB + 2))
    answer = router.http.post("/v1/completions", content=parts)
    assert answer.status_code == 413
    assert f"{limit} bytes (--max-body-bytes)" in answer.json()["error"]["message"]


def test_sequences_are_limited_in_sum(make_router):
    """With the product's defaults."""
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


def test_the_key_is_checked_before_the_body_is_read(make_router):
    router = make_router(api_key="secret")
    with send_part(router.server.port, 10) as client:
        assert client.recv(4096).startswith(b"HTTP/1.1 401 ")
