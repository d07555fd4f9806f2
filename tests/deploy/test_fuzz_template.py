"""Fuzzes the answers of a host's template. `test_template` fuzzes its clients; both belong to one user."""

from __future__ import annotations

import secrets
import socket
import threading
from contextlib import closing, suppress

import msgspec
import psutil
from hypothesis import strategies as st

from deploy.template.client import (
    MAX_MESSAGE_BYTES,
    Ended,
    Spawned,
    SpawnFailed,
    TemplateClient,
    TemplateError,
    TemplateReply,
    WorkerExit,
)
from tests.fuzzing import altered, damaged, fuzz

REPLIES: list[TemplateReply] = [Spawned(7), SpawnFailed("why"), Ended(7, 9)]


def test_fuzz_the_template() -> None:
    """A client gets an answer or one of our own errors."""
    name = f"test-{secrets.token_hex(8)}"
    replies: list[bytes] = []

    def serve() -> None:
        with suppress(OSError):  # the test is over
            while True:
                connection, _ = listener.accept()
                workers, control = socket.socketpair()
                with workers, control, connection, suppress(ConnectionError):  # the client has hung up
                    connection.recv(MAX_MESSAGE_BYTES)
                    for reply in replies:
                        socket.send_fds(connection, [reply], [control.fileno()])

    def check(example: list[bytes]) -> None:
        replies[:] = example
        with closing(TemplateClient(name, {}, own_stderr=False)) as client, suppress(TemplateError):
            assert isinstance(client.spawn(b"launch", 60.0).wait(), WorkerExit)

    raw = [msgspec.msgpack.encode(reply) for reply in REPLIES]
    first = st.sampled_from(raw) | damaged(raw) | altered(raw)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(f"\0{name}")
        listener.listen()
        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        num_fds = psutil.Process().num_fds()
        check([raw[0], msgspec.msgpack.encode(Ended(7, 40))])
        fuzz(check, st.lists(first, max_size=2), examples=200)
        assert psutil.Process().num_fds() <= num_fds + 2
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()
