"""A TCP proxy that damages a connection's bytes like a bad network, or worse."""

from __future__ import annotations

import contextlib
import select
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

Kind = Literal["drop", "hang", "delay", "corrupt", "truncate", "swap", "repeat"]
CHUNK = 16 * 1024


@dataclass(frozen=True)
class Damage:
    """Damage to a connection's bytes from `offset` on, done once.

    `drop` resets the connection; `hang` stops passing bytes on, in either direction; `delay` pauses for
    `seconds`; `corrupt` flips a bit in each of `length` bytes; `truncate` loses `length` bytes; `swap`
    exchanges `length` bytes with the `length` that follow; `repeat` passes them on twice.
    """

    kind: Kind
    offset: int
    length: int = 1
    seconds: float = 0.0
    upstream: bool = True
    """True for the sender's bytes, False for the receiver's."""
    connection: int = 0
    """The connection's number, counted from 0; -1 for each."""


class Proxy:
    """Forwards connections to `target` with `damages`, and records the bytes of the first one."""

    def __init__(self, target: str, damages: list[Damage], host: str = "127.0.0.1") -> None:
        self._target = target.rpartition(":")
        self._damages = damages
        self._listener = socket.create_server((host, 0))
        self.address = f"{host}:{self._listener.getsockname()[1]}"
        self.connections = 0
        self.spoken = {True: bytearray(), False: bytearray()}
        """The recorded bytes, upstream and downstream."""
        self.struck = threading.Event()
        """Set when a damage has been done."""
        self._closing = threading.Event()
        self._threads: list[threading.Thread] = []
        self._sockets: list[socket.socket] = []
        self._start(self._accept)

    def close(self) -> None:
        self._closing.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        for sock in list(self._sockets):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        for thread in list(self._threads):
            thread.join(5)
            assert not thread.is_alive(), "a thread of the proxy does not end"
        for sock in [self._listener, *self._sockets]:
            sock.close()

    def redirect(self, target: str) -> None:
        """Lead new connections to another target."""
        self._target = target.rpartition(":")

    def _start(self, target: Callable[..., object], *arguments: object) -> None:
        thread = threading.Thread(target=target, args=arguments, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while not self._closing.is_set():
            try:
                accepted, _ = self._listener.accept()
            except OSError:
                return
            number, self.connections = self.connections, self.connections + 1
            try:
                onward = socket.create_connection((self._target[0], int(self._target[2])), 5)
            except OSError:
                _reset(accepted)
                accepted.close()
                continue
            self._sockets += [accepted, onward]
            pair = _Pair(accepted, onward)
            for upstream in (True, False):
                mine = [
                    damage
                    for damage in self._damages
                    if damage.connection in (number, -1) and damage.upstream == upstream
                ]
                self._start(
                    self._pump, pair, upstream, sorted(mine, key=lambda damage: damage.offset), number
                )

    def _pump(self, pair: _Pair, upstream: bool, damages: list[Damage], number: int) -> None:
        source, sink = (pair.near, pair.far) if upstream else (pair.far, pair.near)
        stream = _Stream(source)
        try:
            while not pair.hung.is_set():
                due = damages[0].offset - stream.taken if damages else CHUNK
                if due <= 0:
                    self._strike(damages.pop(0), pair, stream, sink)
                    continue
                data = stream.take(min(due, CHUNK))
                if number == 0:
                    self.spoken[upstream] += data
                if not data:
                    sink.shutdown(socket.SHUT_WR)
                    return
                sink.sendall(data)
        except OSError:
            _reset(pair.near)
            _reset(pair.far)

    def _strike(self, damage: Damage, pair: _Pair, stream: _Stream, sink: socket.socket) -> None:
        self.struck.set()
        match damage.kind:
            case "drop":
                raise ConnectionResetError
            case "hang":
                pair.hung.set()
            case "delay":
                self._closing.wait(damage.seconds)
            case "corrupt":
                sink.sendall(bytes(byte ^ 0x10 for byte in stream.take_all(damage.length)))
            case "truncate":
                stream.take_all(damage.length)
            case "swap":
                first = stream.take_all(damage.length)
                sink.sendall(stream.take_all(damage.length, patience_s=0.2) + first)
            case "repeat":
                sink.sendall(stream.take_all(damage.length) * 2)


@dataclass
class _Pair:
    near: socket.socket
    far: socket.socket

    def __post_init__(self) -> None:
        self.hung = threading.Event()


class _Stream:
    """A socket's incoming bytes, and how many of them were taken."""

    def __init__(self, source: socket.socket) -> None:
        self._source = source
        self.taken = 0

    def take(self, limit: int) -> bytes:
        data = self._source.recv(limit)
        self.taken += len(data)
        return data

    def take_all(self, nbytes: int, patience_s: float = 60.0) -> bytes:
        """Take `nbytes` bytes, or fewer at the end of the stream or when patience runs out."""
        data, deadline = b"", time.monotonic() + patience_s
        while len(data) < nbytes:
            readable, _, _ = select.select([self._source], [], [], max(0.0, deadline - time.monotonic()))
            more = self.take(nbytes - len(data)) if readable else b""
            if not more:
                break
            data += more
        return data


def _reset(sock: socket.socket) -> None:
    """End a connection at once, for both ends, as a failing network does."""
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        sock.shutdown(socket.SHUT_RDWR)
