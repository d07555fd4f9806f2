"""The description of a worker that its process receives at the start, and the handle that stops it."""

from __future__ import annotations

import platform
import threading
from collections.abc import Callable

import msgspec

from messaging.sockets import ClusterKeys
from protocol.config import ServeConfig
from protocol.errors import ConfigError
from protocol.ids import new_incarnation
from protocol.roles import RoleSpec
from protocol.version import version


class Launch(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of one worker, sent to it as msgpack."""

    role: RoleSpec
    worker_id: str
    incarnation: str = msgspec.field(default_factory=new_incarnation)
    router_endpoints: list[str]
    config: ServeConfig
    keys: ClusterKeys
    shares_cores: bool = False
    """Whether the worker shares cores with the idle workers of its host."""
    release: str = msgspec.field(default_factory=version)
    """The server's version of Tandem, which the worker's node must have."""


class _Release(msgspec.Struct):
    """The part of a `Launch` that every version of Tandem can read."""

    release: str = ""


def read_launch(encoded: bytes) -> Launch:
    """Decode a `Launch` on the worker's node. Raises `ConfigError` if its Tandem has another version."""
    release = msgspec.msgpack.decode(encoded, type=_Release).release
    if release != version():
        raise ConfigError(
            f"node {platform.node()} has Tandem {version()}, the server Tandem {release}: install the same"
        )
    return msgspec.msgpack.decode(encoded, type=Launch)


class StopHandle:
    """A handle that remembers a stop requested before the loop exists."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._stop_loop: Callable[[], None] | None = None
        self.requested = False

    def stop(self) -> None:
        with self._lock:
            self.requested = True
            if self._stop_loop is not None:
                self._stop_loop()

    def attach(self, stop_loop: Callable[[], None]) -> None:
        with self._lock:
            self._stop_loop = stop_loop
            if self.requested:
                stop_loop()
