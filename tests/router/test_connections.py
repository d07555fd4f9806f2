"""Clients that connect and then send nothing, too little or too much."""

from __future__ import annotations

import contextlib
import http.client
import json
import logging
import resource
import socket
import subprocess
import sys
from email.message import Message

import httpx
import pytest

from router import connection
from tests.router.router_clients import eventually, is_idle

HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n"


def connect(router) -> socket.socket:
    return socket.create_connection(("127.0.0.1", router.server.port), timeout=10)


def next_answer(client: socket.socket) -> tuple[int, Message]:
    """Receive one whole answer, in however many parts it comes: its status and headers."""
    response = http.client.HTTPResponse(client)
    response.fp.close()
    response.fp = client.makefile("rb", buffering=0)  # a buffer would swallow the start of the next answer
    response.begin()
    assert b"".join(iter(lambda: response.read(1 << 16), b"")) and not response.length, "it is cut off"
    return response.status, response.headers


def received(client: socket.socket) -> bytes:
    """Receive until the server closes."""
    return b"".join(iter(lambda: client.recv(1 << 16), b""))


def answer(client: socket.socket) -> tuple[int, dict]:
    """Return status and error."""
    head, _, body = received(client).partition(b"\r\n\r\n")
    assert b"content-type: application/json" in head
    return int(head.split()[1]), json.loads(body)["error"]


@pytest.mark.parametrize("begun", [b"", b"\r\n", HEAD, HEAD + b"x-header: "])
def test_headers_have_a_deadline(make_router, monkeypatch, begun):
    monkeypatch.setattr(connection, "HEAD_TIMEOUT_S", 0.2)
    router = make_router()
    with connect(router) as client:
        client.sendall(begun)
        status, error = answer(client)
    assert (status, error["type"]) == (408, "timeout_error")
    assert router.http.get("/health").status_code == 200


@pytest.mark.parametrize("begun", [b"\r\n", HEAD])
def test_a_connections_next_request_has_a_deadline_too(make_router, monkeypatch, begun):
    router = make_router()
    with connect(router) as client:
        client.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        assert next_answer(client)[0] == 200
        monkeypatch.setattr(connection, "HEAD_TIMEOUT_S", 0.2)
        client.sendall(begun)
        assert answer(client)[0] == 408


def test_a_slow_body_is_not_a_slow_header(make_router, monkeypatch):
    monkeypatch.setattr(connection, "HEAD_TIMEOUT_S", 0.2)
    router = make_router()
    worker = router.add_worker()
    worker.hold.set()
    body = b'{"prompt": "x", "max_tokens": 1}'
    with connect(router) as client:
        client.sendall(HEAD + b"content-length: %d\r\nconnection: close\r\n\r\n" % len(body))
        client.settimeout(0.6)
        with pytest.raises(TimeoutError):
            client.recv(1)
        client.sendall(body)
        with pytest.raises(TimeoutError):
            client.recv(1)
        worker.hold.clear()
        assert client.recv(1 << 16).startswith(b"HTTP/1.1 200 OK")


HEADS = {
    "too many": b"".join(b"x-%d: y\r\n" % i for i in range(129)) + b"\r\n",
    "too long": b"x: " + b"y" * 70_000 + b"\r\n\r\n",
    "too long and never ends": b"x: " + b"y" * 2_000_000,
    "too much": b"".join(b"x-%d: %b\r\n" % (i, b"y" * 1000) for i in range(100)) + b"\r\n",
}


@pytest.mark.parametrize("head", HEADS.values(), ids=HEADS)
def test_headers_are_limited(router, head):
    with connect(router) as client:
        client.sendall(HEAD + head)
        status, error = answer(client)
    assert (status, error["type"]) == (431, "invalid_request_error")
    assert "128 headers" in error["message"]


def test_a_long_url_is_refused(router):
    with connect(router) as client:
        client.sendall(b"GET /" + b"x" * 70_000 + b" HTTP/1.1\r\nhost: x\r\n\r\n")
        assert answer(client)[0] == 431


def test_usual_headers_pass(router):
    headers = {f"x-{i}": "y" * 400 for i in range(110)}
    assert router.http.get("/health", headers=headers).status_code == 200


def test_other_protocols_get_an_error_in_openais_shape(router):
    with connect(router) as client:
        client.sendall(b"hello there\r\n\r\n")
        status, error = answer(client)
    assert (status, error["type"]) == (400, "invalid_request_error")


def test_idle_connections_shut_nobody_out(make_router, monkeypatch, caplog):
    monkeypatch.setattr(connection, "MAX_CONNECTIONS", 20)
    router = make_router()
    with caplog.at_level(logging.WARNING):
        clients = [connect(router) for _ in range(60)]
        for _ in range(10):
            assert httpx.get(router.url + "/health", timeout=60).status_code == 200
    assert len(router.server._server.server_state.connections) <= 20
    assert [
        record.getMessage() for record in caplog.records if "HTTP connections" in record.getMessage()
    ] == ["20 HTTP connections are open, the limit: the one idle longest is closed"]
    for client in clients:
        client.close()


def test_running_requests_are_not_closed_for_new_connections(make_router, monkeypatch, pool):
    monkeypatch.setattr(connection, "MAX_CONNECTIONS", 4)
    router = make_router()
    worker = router.add_worker()
    worker.hold.set()
    body = {"prompt": "x", "max_tokens": 2}
    running = [
        pool.submit(httpx.post, router.url + "/v1/completions", json=body, timeout=60) for _ in range(4)
    ]
    eventually(lambda: len(worker.jobs) == 4)
    with connect(router) as client:
        status, error = answer(client)
    assert (status, error["code"]) == (503, "service_unavailable")
    worker.hold.clear()
    assert {future.result(20).status_code for future in running} == {200}


def test_the_soft_limit_of_open_files_is_raised() -> None:
    code = (
        "import resource\n"
        "from router.connection import connection_limit\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (128, 1024))\n"
        "print(connection_limit(), resource.getrlimit(resource.RLIMIT_NOFILE))\n"
    )
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[1] >= 1024
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "768 (1024, 1024)\n"


def test_http_1_0_gets_its_stream_without_chunks(make_router):
    """nginx uses HTTP/1.0 by default."""
    router = make_router()
    worker = router.add_worker(stall_after=1)
    body = b'{"prompt": "x", "max_tokens": 3, "stream": true}'
    with connect(router) as client:
        head = HEAD.replace(b"1.1", b"1.0")
        client.sendall(head + b"content-length: %d\r\n\r\n" % len(body) + body)
        answered = b""
        for number in (1, 2, 3):  # an unread token would be sent together with the next one
            worker.stall_after = number
            while answered.count(b"data: {") < number:
                answered += (data := client.recv(1 << 16))
                assert data, "the router has closed"
        head, _, body = (answered + received(client)).partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in head and b"connection: close" in head
    assert body.startswith(b"data: {") and body.endswith(b"data: [DONE]\n\n")
    events = [json.loads(line[6:]) for line in body.split(b"\n\n") if line.startswith(b"data: {")]
    assert len(events) >= 3 and b"\r\n" not in body
    with connect(router) as client:
        client.sendall(b"GET /health HTTP/1.0\r\n\r\n")
        answered = received(client)
    assert b"content-length: 15" in answered and answered.endswith(b'{"status":"ok"}')


def test_a_client_that_half_closes_gets_the_finished_answer(router):
    with connect(router) as client:
        client.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        client.shutdown(socket.SHUT_WR)
        answered = received(client)
    assert answered.startswith(b"HTTP/1.1 200 OK") and answered.endswith(b'{"status":"ok"}')


def test_a_client_that_half_closes_ends_its_generation(make_router):
    router = make_router()
    worker = router.add_worker()
    worker.hold.set()
    body = b'{"prompt": "x", "max_tokens": 3}'
    with connect(router) as client:
        client.sendall(HEAD + b"content-length: %d\r\n\r\n" % len(body) + body)
        eventually(lambda: worker.jobs)
        client.shutdown(socket.SHUT_WR)
        assert received(client) == b""
    worker.hold.clear()
    eventually(lambda: worker.aborted and is_idle(router))


def head_and_error(client: socket.socket) -> tuple[bytes, dict]:
    head, _, body = received(client).partition(b"\r\n\r\n")
    assert b"\r\nconnection: close" in head
    return head, json.loads(body)["error"]


@pytest.mark.parametrize(
    ("options", "headers", "status"),
    [
        ({}, b"expect: 100-continue\r\ncontent-length: 99999999\r\n", 413),
        ({"api_key": "x"}, b"expect: 100-continue\r\ncontent-length: 10\r\n", 401),
        ({"api_key": "x"}, b"transfer-encoding: chunked\r\n", 401),
    ],
)
def test_a_client_that_expects_100_continue_is_refused_at_once(make_router, options, headers, status):
    router = make_router(**options)
    with connect(router) as client:
        client.sendall(HEAD + headers + b"\r\n")
        head, error = head_and_error(client)
    assert head.startswith(b"HTTP/1.1 %d " % status)
    if status == 413:
        assert error["message"] == "the body exceeds the limit of 16777216 bytes (--max-body-bytes)"


BIG = 8_000_000


@pytest.mark.parametrize(
    "framing", [b"content-length: %d\r\n\r\n" % BIG, b"transfer-encoding: chunked\r\n\r\n"]
)
def test_a_client_can_read_why_its_large_body_is_refused(make_router, framing):
    router = make_router(max_body_bytes=1000)
    router.add_worker()
    with connect(router) as client:
        client.sendall(HEAD + framing)
        client.sendall(b"%x\r\n" % BIG if b"chunked" in framing else b"")
        client.sendall(b" " * BIG)
        head, error = head_and_error(client)
    assert head.startswith(b"HTTP/1.1 413 ") and "limit of 1000 bytes" in error["message"]


@pytest.mark.parametrize("sends", [True, False])
def test_a_client_that_keeps_sending_after_its_answer_is_disconnected(make_router, monkeypatch, sends):
    monkeypatch.setattr(connection, "DISCARD_S", 0.05)
    monkeypatch.setattr(connection, "MAX_DISCARD_S", 0.2)
    router = make_router(max_body_bytes=1000)
    with connect(router) as client:
        client.sendall(HEAD + b"content-length: 2000\r\n\r\n")
        assert client.recv(1 << 16).startswith(b"HTTP/1.1 413 ")
        with contextlib.suppress(OSError):
            while sends:
                client.sendall(b" ")
        eventually(lambda: not router.server._server.server_state.connections)


CHUNKED = b"transfer-encoding: chunked\r\n\r\n"


@pytest.mark.parametrize("chunks", [b"zz\r\n", b"1\r\n{\r\nxyz\r\n", b"1\r\n{}", b"-1\r\n{\r\n"])
def test_malformed_chunks_are_answered(router, chunks):
    ended = router.metric("tandem_http_connections_ended_total", reason="malformed")
    with connect(router) as client:
        client.sendall(HEAD + CHUNKED + chunks)
        head, error = head_and_error(client)
    assert head.startswith(b"HTTP/1.1 400 ") and error["type"] == "invalid_request_error"
    assert router.metric("tandem_http_connections_ended_total", reason="malformed") == ended + 1


def test_malformed_chunks_after_a_begun_body_are_answered(router):
    with connect(router) as client:
        client.sendall(HEAD + CHUNKED + b"1\r\n{\r\n")
        eventually(lambda: router.server.state.bodies._held == 1)
        client.sendall(b"xyz\r\n")
        assert head_and_error(client)[0].startswith(b"HTTP/1.1 400 ")
    eventually(lambda: router.server.state.bodies._held == 0)


def test_garbage_after_a_running_request_ends_the_request(make_router):
    """An answer to the garbage would come before the request's own answer."""
    router = make_router()
    worker = router.add_worker()
    worker.hold.set()
    body = b'{"prompt": "x", "max_tokens": 3}'
    with connect(router) as client:
        client.sendall(HEAD + b"content-length: %d\r\n\r\n" % len(body) + body)
        eventually(lambda: worker.jobs)
        client.sendall(HEAD + CHUNKED + b"zz\r\n")
        with contextlib.suppress(ConnectionResetError):
            assert received(client) == b""
    worker.hold.clear()
    eventually(lambda: worker.aborted and is_idle(router))


def test_a_connection_is_kept_if_the_body_came_in_parts(router):
    body = b'{"prompt": "x", "max_tokens": 1}'
    with connect(router) as client:
        for _ in range(2):
            client.sendall(HEAD + b"content-length: %d\r\n\r\n" % len(body))
            client.sendall(body[:5])
            client.sendall(body[5:])
            status, headers = next_answer(client)
            assert status == 200 and headers.get("connection") != "close"


UPGRADES = {
    "HTTP/2": b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: A\r\n",
    "websocket": b"connection: upgrade\r\nupgrade: websocket\r\n",
}


@pytest.mark.parametrize("framing", ["length", "chunks"])
@pytest.mark.parametrize("in_parts", [False, True])
@pytest.mark.parametrize("upgrade", UPGRADES)
def test_an_upgrade_is_ignored_and_the_body_read(router, caplog, upgrade, in_parts, framing):
    body = b'{"prompt": "x", "max_tokens": 1}'
    head, sent = b"content-length: %d\r\n" % len(body), body
    if framing == "chunks":
        head, sent = b"transfer-encoding: chunked\r\n", b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
    request = HEAD + UPGRADES[upgrade] + head + b"\r\n" + sent
    parts = [request[:60], request[60:-5], request[-5:]] if in_parts else [request + request]
    with connect(router) as client:
        for part in parts * (2 if in_parts else 1):
            client.sendall(part)
        for _ in range(2):
            status, headers = next_answer(client)
            assert status == 200 and headers.get("connection") != "close"
    assert not caplog.records


def test_many_pipelined_upgrades_in_one_piece_are_answered(router, caplog):
    number = 1200  # more than Python's frames
    request = b"GET /health HTTP/1.1\r\nhost: x\r\n" + UPGRADES["websocket"] + b"\r\n"
    end = b"GET /nowhere HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
    with connect(router) as client:
        client.sendall(request * number + end)
        assert received(client).count(b"HTTP/1.1 200") == number
    assert not caplog.records


def test_a_connect_request_is_refused(router):
    with connect(router) as client:
        client.sendall(b"CONNECT x:1 HTTP/1.1\r\nhost: x\r\n\r\nmore")
        assert next_answer(client)[0] in (400, 404, 405)
    assert httpx.get(f"{router.url}/health", timeout=60).status_code == 200


@pytest.mark.parametrize("encoding", ["gzip", "br", "x" * 100])
def test_an_encoded_body_is_refused_by_name(router, encoding):
    headers = {"content-encoding": encoding, "content-type": "application/json"}
    answer = httpx.post(f"{router.url}/v1/completions", content=b"\x1f\x8b", headers=headers, timeout=60)
    assert answer.status_code == 415
    assert answer.json()["error"]["message"].startswith(
        f"content-encoding: '{encoding[:64]}' is not supported"
    )
