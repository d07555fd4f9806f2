"""Clients that send too little or read nothing, all at once, under the product's default limits."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable

from router.connection import HEAD_TIMEOUT_S, UNREAD_TIMEOUT_S
from router.decoding import BODY_TIMEOUT_S
from tests.router.router_clients import eventually

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
