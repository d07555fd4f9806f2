"""Sockets between processes: keys, and wake-ups of waiting threads."""

from __future__ import annotations

import contextlib
import os
import select

import msgspec
import pytest
import zmq

from messaging.sockets import ClusterKeys, bind_router, connect_dealer, start_authenticator
from messaging.wake import StoppedError, Wake

PATIENCE_MS = 10_000
SILENCE_MS = 600


@pytest.fixture
def context():
    context = zmq.Context()
    yield context
    context.destroy(linger=0)


@pytest.fixture
def cluster(context):
    keys = ClusterKeys.generate()
    authenticator = start_authenticator(context, keys)
    router, endpoint = bind_router(context, keys, "127.0.0.1")
    yield keys, router, endpoint
    router.close()
    authenticator.stop()


def hears(socket: zmq.Socket, milliseconds: int = SILENCE_MS) -> bool:
    return bool(socket.poll(milliseconds))


def try_to_say(stranger: zmq.Socket, message: bytes) -> None:
    """Send if possible. A stranger that was already turned away has no peer to send to."""
    with contextlib.suppress(zmq.Again):
        stranger.send(message, zmq.NOBLOCK)


def test_a_member_is_heard_and_answered(context, cluster):
    keys, router, endpoint = cluster
    with connect_dealer(context, keys, endpoint, "worker-0") as dealer:
        dealer.send(b"hello")
        assert hears(router, PATIENCE_MS)
        assert router.recv_multipart() == [b"worker-0", b"hello"]
        router.send_multipart([b"worker-0", b"welcome"])
        assert hears(dealer, PATIENCE_MS)
        assert dealer.recv() == b"welcome"


def replaced(keys: ClusterKeys, *fields: str) -> ClusterKeys:
    stranger = ClusterKeys.generate()
    return msgspec.structs.replace(keys, **{field: getattr(stranger, field) for field in fields})


@pytest.mark.parametrize(
    "wrong",
    [
        ("client_public", "client_secret"),
        ("server_public", "server_secret"),
        ("client_secret",),
        ("server_public", "server_secret", "client_public", "client_secret"),
    ],
    ids=["another client pair", "another server key", "a secret that does not fit", "another cluster"],
)
def test_a_stranger_gets_nothing(context, cluster, wrong):
    keys, router, endpoint = cluster
    with connect_dealer(context, replaced(keys, *wrong), endpoint, "worker-0") as stranger:
        try_to_say(stranger, b"hello")
        assert not hears(router)
        router.send_multipart([b"worker-0", b"secret"])
        assert not hears(stranger)


def test_no_encryption_no_entry(context, cluster):
    _, router, endpoint = cluster
    with context.socket(zmq.DEALER) as plain:
        plain.linger = 0
        plain.identity = b"worker-0"
        plain.connect(endpoint)
        try_to_say(plain, b"hello")
        assert not hears(router)
        assert not hears(plain)


def test_a_stranger_cannot_take_a_members_place(context, cluster):
    """The router lets a reconnecting worker take over its own name. A stranger must not get that far."""
    keys, router, endpoint = cluster
    with connect_dealer(context, keys, endpoint, "worker-0") as member:
        member.send(b"hello")
        assert hears(router, PATIENCE_MS)
        router.recv_multipart()
        with connect_dealer(context, ClusterKeys.generate(), endpoint, "worker-0") as stranger:
            try_to_say(stranger, b"it is me")
            assert not hears(router)
            router.send_multipart([b"worker-0", b"for the member"])
            assert hears(member, PATIENCE_MS)
            assert member.recv() == b"for the member"
            assert not hears(stranger, 100)


def test_a_restarted_member_takes_over_its_name(context, cluster):
    keys, router, endpoint = cluster
    with connect_dealer(context, keys, endpoint, "worker-0") as first:
        first.send(b"first")
        assert hears(router, PATIENCE_MS)
        router.recv_multipart()
        with connect_dealer(context, keys, endpoint, "worker-0") as second:
            second.send(b"second")
            assert hears(router, PATIENCE_MS)
            assert router.recv_multipart()[-1] == b"second"
            router.send_multipart([b"worker-0", b"answer"])
            assert hears(second, PATIENCE_MS)
            assert second.recv() == b"answer"


def test_keys_travel_as_msgpack_and_differ_each_time():
    keys = ClusterKeys.generate()
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(keys), type=ClusterKeys) == keys
    assert ClusterKeys.generate().transfer_key != keys.transfer_key


def is_readable(wake: Wake) -> bool:
    poll = select.poll()
    poll.register(wake, select.POLLIN)
    return bool(poll.poll(0))


def test_a_set_is_cleared() -> None:
    wake = Wake()
    assert not is_readable(wake)
    wake.set()
    wake.set()
    assert is_readable(wake)
    wake.clear()
    assert not is_readable(wake)
    wake.close()


def test_a_stop_is_never_cleared() -> None:
    wake = Wake()
    wake.stop()
    for _ in range(2):
        assert is_readable(wake)
        with pytest.raises(StoppedError):
            wake.clear()
    wake.close()


def test_a_stop_during_a_clear_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither this thread nor the other waiting threads miss the stop."""
    wake, read = Wake(), os.eventfd_read

    def stop_and_read(fd: int) -> int:
        if not wake.stopped:
            wake.stop()
        return read(fd)

    monkeypatch.setattr(os, "eventfd_read", stop_and_read)
    with pytest.raises(StoppedError):
        wake.clear()
    assert is_readable(wake)
    wake.close()


def test_a_closed_wake_up_leaves_reused_descriptors_alone() -> None:
    wake = Wake()
    wake.close()
    fd = os.eventfd(0, os.EFD_NONBLOCK)  # most likely with the same number
    wake.set()
    wake.close()
    with pytest.raises(BlockingIOError):
        os.eventfd_read(fd)
    os.close(fd)
