"""Binds one of several ports."""

from __future__ import annotations

import errno
import random
from collections.abc import Callable, Sequence
from typing import TypeVar

from protocol.errors import ConfigError

Bound = TypeVar("Bound")


def bind_one(ports: Sequence[int], bind: Callable[[int], Bound]) -> Bound:
    """Call `bind` with one port after the other until a port is free; return its result. Port 0 means any
    free port.

    The order is random: a restarted worker seldom gets its old port, to which others still try to connect.
    `bind` raises OSError for a taken port. Raises `ConfigError` if all ports are taken.
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
