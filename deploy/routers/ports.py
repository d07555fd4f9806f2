"""Reserves the ports of several routers for as long as the launcher runs.

A bound socket that does not listen reserves a port: Linux lets a router bind the port too, and gives
connections only to sockets that listen. So a restarted router finds its ports free.
"""

from __future__ import annotations

import contextlib
import errno
import socket
from functools import partial

from messaging.ports import bind_one
from protocol.config import ServeConfig
from protocol.errors import ConfigError
from protocol.ports import router_ports
from router.server import RouterPlace, bind_http

_TRIES = 20


class RouterPorts:
    """The routers' ports: all share `port`; `port` + 1 belongs to the first router alone, and so on. Raises
    `ConfigError`.
    """

    def __init__(self, config: ServeConfig, link_host: str) -> None:
        self._kept = contextlib.ExitStack()
        self.port = self._keep_http(config)
        keep_link = partial(_keep_link, link_host)
        links = [bind_one(router_ports(config), keep_link) for _ in range(config.router_replicas)]
        for link in links:
            self._kept.callback(link.close)
        self.places = [
            RouterPlace(
                router_id=f"router-{index}", own_port=self.port + 1 + index, link_port=link.getsockname()[1]
            )
            for index, link in enumerate(links)
        ]

    def close(self) -> None:
        self._kept.close()

    def _keep_http(self, config: ServeConfig) -> int:
        """Return the shared port. If the configuration names none, choose one that is followed by enough
        free ports.
        """
        for attempt in range(_TRIES):
            with contextlib.ExitStack() as kept:
                first = kept.enter_context(_keep(config.host, config.port))
                port: int = first.getsockname()[1]
                try:
                    for number in range(port + 1, port + 1 + config.router_replicas):
                        kept.enter_context(_keep(config.host, number))
                except ConfigError:
                    if config.port or attempt == _TRIES - 1:
                        raise
                    continue
                self._kept = kept.pop_all()
                return port
        raise AssertionError


def _keep_link(host: str, port: int) -> socket.socket:
    try:
        return _keep(host, port)
    except ConfigError as error:
        raise OSError(errno.EADDRINUSE, str(error)) from error


def _keep(host: str, port: int) -> socket.socket:
    """Reserve a port. A first, exclusive bind makes sure that no other process has it."""
    with bind_http(host, port) as probe:
        port = probe.getsockname()[1]
    return bind_http(host, port, shared=True, listens=False)
