"""TCP sockets for every transport between hosts."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Sequence

from messaging.ports import bind_one
from protocol.ports import ANY_PORT

_DEAD_AFTER_MS = 30_000


def listen_tcp(host: str, ports: Sequence[int] = ANY_PORT) -> tuple[socket.socket, str]:
    """Return a listening socket on one of these ports of `host`, and its address."""
    family, _, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]

    def listen(port: int) -> socket.socket:
        listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            # A range is too small for ports that stay in TIME_WAIT for a minute after their connections.
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, port != 0)
            listener.bind((address[0], port, *address[2:]))
            listener.listen(128)
        except BaseException:
            listener.close()
            raise
        return listener

    listener = bind_one(ports, listen)
    return listener, "{}:{}".format(*listener.getsockname()[:2])


def connect_tcp(address: str) -> socket.socket:
    """Begin to connect to `host:port`, without blocking."""
    host, _, port = address.rpartition(":")
    family, _, _, _, target = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST | socket.AI_NUMERICSERV
    )[0]
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setblocking(False)
    tune(sock)
    code = sock.connect_ex(target)
    if code not in (0, errno.EINPROGRESS):
        sock.close()
        raise OSError(code, os.strerror(code))
    return sock


def tune(sock: socket.socket) -> None:
    """Send at once, and detect a dead host."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", 5),
        ("TCP_KEEPINTVL", 2),
        ("TCP_KEEPCNT", 3),
        ("TCP_USER_TIMEOUT", _DEAD_AFTER_MS),
    ):
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
