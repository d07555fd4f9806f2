"""Any bytes between a host's template and who asks it for workers. Both are of one user."""

from __future__ import annotations

import os
import secrets
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from pathlib import Path

import msgspec
import psutil
import pytest
from hypothesis import strategies as st

from deploy.template.client import TemplateClient, TemplateError, WorkerExit
from deploy.template.messages import MAX_MESSAGE_BYTES, Ended, Spawn, Spawned, SpawnFailed, TemplateReply
from protocol.roles import ROLES
from tests.deploy.test_template import Host
from tests.fuzzing import GROWTH_BYTES, SECONDS, altered, damaged, fuzz
from tests.worker.harness import tiny_config
from worker.launch import Launch

REPLIES: list[TemplateReply] = [Spawned(7), SpawnFailed("why"), Ended(7, 9)]
ANSWERED = 400
"""More answers than a connection holds."""


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Iterator[Host]:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with closing(Host()) as host:
        yield host


def test_fuzz_a_client(host: Host, tiny_folder: Path) -> None:
    """Afterwards the template starts workers as before, and holds no more."""
    host.spawn("decode-0", tiny_config(tiny_folder))
    host.wait_ready("decode-0")
    before, template = host.tokens("decode-0"), host.template()
    num_fds, rss = template.num_fds(), template.memory_info().rss
    launch = Launch(
        role=ROLES["decode"],
        worker_id="decode-9",
        router_endpoints=[host.cluster.endpoint],
        config=tiny_config(tiny_folder),
        keys=host.cluster.keys,
    )
    inner = [msgspec.msgpack.encode(launch)]
    outer = [msgspec.msgpack.encode(Spawn(b"launch", {"NAME": "value"}))]
    launches = (damaged(inner) | altered(inner)).map(lambda raw: msgspec.msgpack.encode(Spawn(raw, {})))
    messages = damaged(outer) | altered(outer) | launches

    def check(parts: Sequence[tuple[bytes, int]]) -> None:
        with connected(host.name) as client, open(os.devnull) as file, suppress(ConnectionError):
            for message, num_fds in parts:  # an empty one ends the connection
                if message or num_fds:
                    socket.send_fds(client, [message], [file.fileno()] * num_fds)

    fuzz(check, st.lists(st.tuples(messages, st.integers(0, 3)), max_size=3), examples=60)
    check([(b"", 2)] * 20)
    with connected(host.name) as client:
        client.setblocking(False)
        with suppress(BlockingIOError):  # the template may be slower
            for _ in range(ANSWERED):
                client.send(b"\xc1")
        host.spawn("decode-1", tiny_config(tiny_folder))
        host.wait_ready("decode-1")
    assert host.tokens("decode-1") == before and host.template() == template
    host.cluster.wait(lambda: template.num_fds() <= num_fds + 1, 10)
    assert not SECONDS or template.memory_info().rss - rss < GROWTH_BYTES
    assert len(template.children()) == 2


def connected(name: str) -> socket.socket:
    client = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    client.connect(f"\0{name}")
    return client


def test_fuzz_the_template() -> None:
    """A client has an answer, or an error of ours."""
    name = f"test-{secrets.token_hex(8)}"
    replies: list[bytes] = []

    def serve() -> None:
        with suppress(OSError):  # the test is over
            while True:
                connection, _ = listener.accept()
                with connection, suppress(ConnectionError):  # the client has heard enough
                    _, fds, _, _ = socket.recv_fds(connection, MAX_MESSAGE_BYTES, 2)
                    for fd in fds:
                        os.close(fd)
                    for reply in replies:
                        connection.send(reply)

    def check(example: list[bytes]) -> None:
        replies[:] = example
        with closing(TemplateClient(name, {}, own_stderr=False)) as client, suppress(TemplateError):
            assert isinstance(client.spawn(b"launch").wait(), WorkerExit)

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
