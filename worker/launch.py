"""What a worker's process is told."""

from __future__ import annotations

import msgspec

from messaging.sockets import ClusterKeys
from protocol.config import ServeConfig
from protocol.ids import new_incarnation
from protocol.roles import RoleSpec


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
