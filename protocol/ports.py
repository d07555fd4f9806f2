"""Addresses and ports that processes listen on, and the choice of one among several ports."""

from __future__ import annotations

import errno
import random
import re
from collections.abc import Callable, Sequence
from typing import TypeVar

from protocol.errors import ConfigError
from protocol.server_options import ApiOptions, WorkerOptions


def is_loopback(host: str) -> bool:
    return host == "localhost" or host == "::1" or host.startswith("127.")


def is_wildcard(host: str) -> bool:
    return host in ("", "0.0.0.0", "::")


def http_url(config: ApiOptions, host: str, port: int) -> str:
    scheme = "http" if config.tls_cert is None else "https"
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"


ANY_PORT: Sequence[int] = (0,)
"""Any free port."""
_RANGE = re.compile(r"(\d{1,5})-(\d{1,5})\Z")


def router_ports(config: WorkerOptions) -> Sequence[int]:
    """Return the first ports of the range, one for each router. Raises `ConfigError`."""
    ports = _ports(config)
    return ports if ports is ANY_PORT else ports[: config.router_replicas]


def worker_ports(config: WorkerOptions) -> Sequence[int]:
    """Return the ports after the routers', which a restarted router needs. Raises `ConfigError`."""
    ports = _ports(config)
    return ports if ports is ANY_PORT else ports[config.router_replicas :]


def _ports(config: WorkerOptions) -> Sequence[int]:
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


Bound = TypeVar("Bound")


def bind_one(ports: Sequence[int], bind: Callable[[int], Bound]) -> Bound:
    """Call `bind` with one port after another until a port is free. Return the result of `bind`. Port 0: any.

    The order is random, so that a restarted worker seldom gets its old port, to which others still try to
    connect. `bind` has to raise OSError for a taken port. Raises `ConfigError` if all ports are taken.
    """
    for port in random.sample(ports, len(ports)):
        try:
            return bind(port)
        except OSError as error:
            if error.errno != errno.EADDRINUSE or port == 0:
                raise
    raise ConfigError(
        f"--worker-ports: {ports[0]}-{ports[-1]} are all taken on this host; the range's first are for the "
        "routers, each worker needs one, and one more for each of ucx, tcp and object_store"
    )
