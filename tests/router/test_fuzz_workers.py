"""Any bytes at the port that workers connect to, from strangers, and from a worker that has the keys."""

from __future__ import annotations

import logging
import socket
from urllib.parse import urlsplit

import zmq
from hypothesis import strategies as st
from router_clients import eventually, is_idle, post

from messaging.sockets import connect_dealer
from protocol.codec import encode
from protocol.messages import Absent, Leaving, Prefetched, StepOutput, TokenOutput
from tests.fuzzing import damaged, fuzz

GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"CURVE".ljust(20, b"\0") + b"\0" + bytes(31)
HELLO = b"\x04\xc8\x05HELLO\x01\x00" + bytes(72) + b"k" * 32 + bytes(8) + b"s" * 80


def check_all_is_well(router, caplog) -> None:
    eventually(lambda: is_idle(router))
    assert post(router, max_tokens=2).status_code == 200
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


def test_fuzz_strangers(router, caplog):
    address = urlsplit(router.server.worker_endpoint)

    def check(parts: list[bytes]) -> None:
        with socket.create_connection((address.hostname, address.port), timeout=10) as client:
            for part in parts:
                try:
                    client.sendall(part)
                except ConnectionError:
                    break

    frames = damaged([GREETING, GREETING + HELLO, HELLO, b"\x04\x05READY", b"\x02" + b"\xff" * 8])
    fuzz(check, st.lists(frames | st.binary(max_size=100), max_size=3), examples=100)
    check_all_is_well(router, caplog)


def messages(router) -> list[bytes]:
    worker = router.workers[0]
    names = {"worker_id": "decode-9", "incarnation": "x"}
    output = TokenOutput(request_id="r", token_ids=[1], finish_reason="length")
    return [
        encode(worker.state()),
        encode(StepOutput(**names, outputs=[output])),
        encode(Absent(**names, request_ids=["r"])),
        encode(Leaving(**names)),
        encode(Prefetched(**names, request_id="r", complete=True)),
    ]


def test_fuzz_a_member(router, caplog):
    """It has its own name, so what it says of itself harms nobody else's requests."""
    caplog.set_level(logging.ERROR)  # a line for each is not kept
    before = router.metric("tandem_messages_dropped_total", reason="malformed")
    sent = 0

    def check(raw: bytes) -> None:
        nonlocal sent
        dealer.send(raw)
        sent += 1

    def dropped() -> float:
        return router.metric("tandem_messages_dropped_total", reason="malformed") - before

    whole = messages(router)
    with (
        zmq.Context() as context,
        connect_dealer(context, router.keys, router.server.worker_endpoint, "decode-9") as dealer,
    ):
        fuzz(check, damaged(whole), examples=300)
        eventually(lambda: dropped() > sent / 10)
    check_all_is_well(router, caplog)
