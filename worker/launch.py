"""What a worker's process is told."""

from __future__ import annotations

import platform

import msgspec

from messaging.sockets import ClusterKeys
from protocol.config import ServeConfig
from protocol.errors import ConfigError
from protocol.ids import new_incarnation
from protocol.roles import RoleSpec
from protocol.version import version


class Launch(msgspec.Struct, frozen=True, kw_only=True):
    """Travels to the worker as msgpack, like every message of ours."""

    role: RoleSpec
    worker_id: str
    incarnation: str = msgspec.field(default_factory=new_incarnation)
    router_endpoints: list[str]
    config: ServeConfig
    keys: ClusterKeys
    shares_cores: bool = False
    """With the other workers of its host, while they are idle."""
    release: str = msgspec.field(default_factory=version)
    """The server's Tandem, which the worker's node must have too."""


class _Release(msgspec.Struct):
    """A `Launch` of any version, as far as all of them agree."""

    release: str = ""


def read_launch(encoded: bytes) -> Launch:
    """On the worker's node. Raises `ConfigError` where another version of Tandem is installed."""
    release = msgspec.msgpack.decode(encoded, type=_Release).release
    if release != version():
        raise ConfigError(
            f"node {platform.node()} has Tandem {version()}, the server Tandem {release}: install the same"
        )
    return msgspec.msgpack.decode(encoded, type=Launch)
