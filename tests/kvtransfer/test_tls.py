"""The tcp transport within TLS: the same blocks, nothing in plain text, and no peer without a certificate."""

from __future__ import annotations

import random
import socket
import ssl
import time
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from bench.transfer.certificates import Authority
from kvtransfer.interface import Completed, Failed
from kvtransfer.transports.registry import TransportOptions
from kvtransfer.transports.tcp import TlsTransport
from messaging.files import TlsFiles
from messaging.wake import Wake
from tests.faults.proxy import Damage, Proxy
from tests.kvtransfer.test_transfer import with_offer
from tests.kvtransfer.transfer_sides import PLAIN, ReceiverEnd, SenderEnd, block, make_pool, push_one
from tests.tiers.seeds import seeds
from tests.waiting import wait_until

Closing = Callable[[Any], Any]
PROMPT_S = 15.0
PATIENT: dict[str, Any] = {"connect_timeout_s": 60.0}
PATIENT_TO_STRANGERS: dict[str, Any] = {"handshake_timeout_s": 60.0}
"""Longer than any wait of a test, so that no event is a time-out, however busy the machine is."""


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("tls") / "ours")


@pytest.fixture(scope="module")
def files(authority: Authority) -> TlsFiles:
    return authority.issue("worker")


@pytest.fixture(scope="module")
def tls(files: TlsFiles) -> TransportOptions:
    return TransportOptions(tls=files)


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory) -> TransportOptions:
    """Return certificates of another authority."""
    return TransportOptions(tls=Authority(tmp_path_factory.mktemp("tls") / "others").issue("worker"))


# --- transfers ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("block_bytes", "streams"), [(48, 1), (16_384, 1), (100_001, 3), (1_835_008, 1)])
def test_blocks_arrive_bit_by_bit(closing: Closing, files: TlsFiles, block_bytes: int, streams: int) -> None:
    options = TransportOptions(tcp_streams=streams, tls=files)
    sender = closing(SenderEnd(["tcp"], make_pool(60, block_bytes, seed=1), options))
    receiver = closing(ReceiverEnd(["tcp"], make_pool(70, block_bytes, seed=2), options))
    rng = random.Random(block_bytes)
    sources, targets = rng.sample(range(60), 50), rng.sample(range(70), 50)
    expected = [block(receiver.pool, index) for index in range(70)]
    for source, target in zip(sources, targets, strict=True):
        expected[target] = block(sender.pool, source)
    receiver.open("lease", targets)
    for start in range(0, 50, 7):
        sender.push(receiver.peer, "lease", sources[start : start + 7], start, final=start + 7 >= 50)
    assert isinstance(sender.wait_lease("lease"), Completed)
    receiver.wait_lease("lease")
    assert [block(receiver.pool, index) for index in range(70)] == expected


# --- what is on the wire ------------------------------------------------------------------------------


@pytest.mark.parametrize("encrypted", [True, False])
def test_nothing_is_in_plain_text(closing: Closing, tls: TransportOptions, encrypted: bool) -> None:
    options = tls if encrypted else PLAIN
    sender = closing(SenderEnd(["tcp"], None, options))
    receiver = closing(ReceiverEnd(["tcp"], None, options))
    proxy = closing(Proxy(receiver.receiver.offers[0].address, []))
    assert isinstance(
        push_one(sender, receiver, with_offer(receiver, "tcp", address=proxy.address)), Completed
    )
    heard = proxy.spoken[True]
    assert len(heard) > 4096
    in_clear = [part in heard for part in (block(sender.pool, 2)[:64], b"lease", b"prefill-0")]
    assert in_clear == [not encrypted] * 3


@pytest.mark.parametrize("flip", [3_000, 200_000])
def test_a_flipped_bit_is_detected_and_repaired_without_checksums(
    closing: Closing, tls: TransportOptions, flip: int
) -> None:
    sender = closing(SenderEnd(["tcp"], make_pool(seed=1), tls))
    receiver = closing(ReceiverEnd(["tcp"], make_pool(seed=2), tls))
    proxy = closing(Proxy(receiver.receiver.offers[0].address, [Damage("corrupt", flip)]))
    receiver.open("lease", range(64))
    sender.push(with_offer(receiver, "tcp", address=proxy.address), "lease", range(64))
    assert isinstance(sender.wait_lease("lease"), Completed)
    assert bytes(receiver.pool.buffer) == bytes(sender.pool.buffer)
    assert receiver.receiver.counters()["failures_malformed"] == 1


def connected(receiver: ReceiverEnd) -> socket.socket:
    host, _, port = receiver.receiver.offers[0].address.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=PROMPT_S)


# --- refusals -----------------------------------------------------------------------------------------


def refused(sender: SenderEnd, receiver: ReceiverEnd) -> str:
    """Return the reason of a refusal, after checking that it came early and that nothing was written."""
    before = bytes(receiver.pool.buffer)
    event = push_one(sender, receiver)
    assert isinstance(event, Failed)
    assert bytes(receiver.pool.buffer) == before
    wait_until(lambda: receiver.receiver.counters().get("handshakes_refused", 0) >= 1)
    assert "failures_internal" not in receiver.receiver.counters() | sender.sender.counters()
    return event.reason


def wait_until_said(caplog: pytest.LogCaptureFixture, reason: str) -> None:
    """Wait until the other end's thread has logged the reason."""
    wait_until(lambda: any(reason in message for message in caplog.messages))


NO_TLS = "the peer speaks TLS, and this side does not"


@pytest.mark.parametrize(
    ("with_tls", "reason", "said"),
    [
        ("receiver", NO_TLS, "TLS: the peer does not speak it"),
        ("sender", "TLS: the peer ended the handshake; it may have no TLS", NO_TLS),
    ],
)
def test_tls_on_one_side_only_is_refused(
    closing: Closing,
    tls: TransportOptions,
    caplog: pytest.LogCaptureFixture,
    with_tls: str,
    reason: str,
    said: str,
) -> None:
    ours, theirs = (tls if with_tls == side else PLAIN for side in ("sender", "receiver"))
    sender = closing(SenderEnd(["tcp"], None, ours, **PATIENT))
    receiver = closing(ReceiverEnd(["tcp"], None, theirs, **PATIENT_TO_STRANGERS))
    assert reason in refused(sender, receiver)
    wait_until_said(caplog, said)


def test_a_receiver_of_another_authority_is_refused(
    closing: Closing, tls: TransportOptions, others: TransportOptions
) -> None:
    receiver = closing(ReceiverEnd(["tcp"], None, others, **PATIENT_TO_STRANGERS))
    reason = refused(closing(SenderEnd(["tcp"], None, tls, **PATIENT)), receiver)
    assert "TLS: the peer's certificate is refused" in reason


def test_a_sender_of_another_authority_is_refused(
    closing: Closing, files: TlsFiles, others: TransportOptions, caplog: pytest.LogCaptureFixture
) -> None:
    """The sender itself accepts the receiver's certificate."""
    assert others.tls is not None
    trusting = TransportOptions(tls=msgspec.structs.replace(others.tls, ca=files.ca))
    receiver = closing(ReceiverEnd(["tcp"], None, TransportOptions(tls=files), **PATIENT_TO_STRANGERS))
    reason = refused(closing(SenderEnd(["tcp"], None, trusting, **PATIENT)), receiver)
    assert "TLS: the peer refuses our certificate" in reason
    wait_until_said(caplog, "TLS: the peer's certificate is refused")


def test_a_sender_without_a_certificate_is_refused(closing: Closing, files: TlsFiles) -> None:
    receiver = closing(ReceiverEnd(["tcp"], None, TransportOptions(tls=files)))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.load_verify_locations(files.ca)
    with (
        connected(receiver) as plain,
        context.wrap_socket(plain) as intruder,
        pytest.raises(ssl.SSLError, match="CERTIFICATE_REQUIRED"),
    ):
        intruder.recv(1)
    wait_until(lambda: receiver.receiver.counters().get("handshakes_refused") == 1)


def test_an_old_tls_version_is_refused(closing: Closing, files: TlsFiles) -> None:
    receiver = closing(ReceiverEnd(["tcp"], None, TransportOptions(tls=files)))
    context = files.context(server_side=False)
    context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_2
    with connected(receiver) as plain, pytest.raises(ssl.SSLError):
        context.wrap_socket(plain)
    wait_until(lambda: receiver.receiver.counters().get("handshakes_refused") == 1)


def test_a_certificate_does_not_replace_the_key(closing: Closing, tls: TransportOptions) -> None:
    sender = closing(SenderEnd(["tcp"], None, tls, key=bytes(32), **PATIENT))
    receiver = closing(ReceiverEnd(["tcp"], None, tls, **PATIENT_TO_STRANGERS))
    assert "handshake" in refused(sender, receiver)


def test_a_silent_connection_is_dropped_at_the_deadline(closing: Closing, tls: TransportOptions) -> None:
    receiver = closing(ReceiverEnd(["tcp"], None, tls, handshake_timeout_s=0.3))
    with connected(receiver) as silent:
        assert silent.recv(1) == b""
    wait_until(lambda: receiver.receiver.counters().get("handshakes_refused") == 1)


def test_a_silent_receiver_is_given_up(closing: Closing, tls: TransportOptions) -> None:
    """The sender does not spin until then."""
    sender, receiver = (
        closing(SenderEnd(["tcp"], None, tls, connect_timeout_s=0.7)),
        closing(ReceiverEnd(["tcp"])),
    )
    with socket.create_server(("127.0.0.1", 0)) as silent:
        peer = with_offer(receiver, "tcp", address=f"127.0.0.1:{silent.getsockname()[1]}")
        before = time.process_time()
        event = push_one(sender, receiver, peer)
        assert isinstance(event, Failed) and "no progress" in event.reason
        assert time.process_time() - before < 0.3


@pytest.mark.parametrize("seed", seeds(4))
def test_garbage_harms_nobody(closing: Closing, tls: TransportOptions, seed: int) -> None:
    rng = random.Random(seed)
    receiver = closing(ReceiverEnd(["tcp"], None, tls, handshake_timeout_s=0.3, max_pending_handshakes=100))
    for _ in range(10):
        with connected(receiver) as raw:
            start = rng.choice([b"", b"\x16\x03\x01", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"])
            raw.sendall(start + rng.randbytes(rng.randrange(1, 400)))
    wait_until(lambda: receiver.receiver.counters().get("handshakes_refused") == 10)
    sender = closing(SenderEnd(["tcp"], None, tls))
    assert isinstance(push_one(sender, receiver), Completed)
    assert "failures_internal" not in receiver.receiver.counters()


# --- the channel --------------------------------------------------------------------------------------


def test_a_blocked_send_continues_where_it_stopped(closing: Closing, files: TlsFiles) -> None:
    """Nobody reads at first. Encrypted bytes count once, and only when they have been sent."""
    wake, transport = closing(Wake()), TlsTransport(files)
    ours, theirs = (
        closing(transport.channel(sock, wake, PROMPT_S, accepted=bool(side)))
        for side, sock in enumerate(socket.socketpair())
    )
    data = memoryview(random.Random(1).randbytes(3_000_000))
    sent, got, blocked = 0, bytearray(), 0
    while len(got) < len(data):
        while sent < len(data):
            some = ours.write([data[sent : sent + 5], data[sent + 5 : sent + 200_000]])
            sent += some
            if not some:
                blocked += 1
                break
        buffers = [memoryview(bytearray(30_000)), memoryview(bytearray(7))]
        received = theirs.receive(buffers)
        got += b"".join(buffers)[:received]
    assert got == data
    assert blocked > 5
