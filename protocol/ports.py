"""`--worker-ports`: the ports on which workers and routers listen for each other."""

from __future__ import annotations

import re
from collections.abc import Sequence

from protocol.config import ServeConfig
from protocol.errors import ConfigError

ANY_PORT: Sequence[int] = (0,)
"""Any free port."""
_RANGE = re.compile(r"(\d{1,5})-(\d{1,5})\Z")


def router_ports(config: ServeConfig) -> Sequence[int]:
    """Return the first ports of the range, one for each router. Raises `ConfigError`."""
    ports = _ports(config)
    return ports if ports is ANY_PORT else ports[: config.router_replicas]


def worker_ports(config: ServeConfig) -> Sequence[int]:
    """Return the ports after the routers', so that no worker takes the port of a restarted router. Raises
    `ConfigError`.
    """
    ports = _ports(config)
    return ports if ports is ANY_PORT else ports[config.router_replicas :]


def _ports(config: ServeConfig) -> Sequence[int]:
    text = config.worker_ports
    if text is None:
        return ANY_PORT
    match = _RANGE.match(text)
    low, high = map(int, match.groups()) if match else (0, 0)
    if not 1 <= low <= high <= 65535:
        raise ConfigError(
            "--worker-ports: must be LOW-HIGH, ports from 1 to 65535, the first not above the second, "
            f"got {text!r}"
        )
    ports = range(low, high + 1)
    if len(ports) <= config.router_replicas:
        raise ConfigError(
            f"--worker-ports: needs more than --router-replicas {config.router_replicas}, got {text!r}, "
            f"which is {len(ports)}"
        )
    return ports
