"""Binds one of several ports."""

from __future__ import annotations

import errno
import random
from collections.abc import Callable, Sequence
from typing import TypeVar

from protocol.errors import ConfigError

Bound = TypeVar("Bound")


def bind_one(ports: Sequence[int], bind: Callable[[int], Bound]) -> Bound:
    """What `bind` returns for a port that is free; 0 is whatever is.

    They are tried in an order of chance: a worker that is started anew seldom gets its old port, to which
    others still try to connect. `bind` raises OSError. Raises `ConfigError` where all are taken.
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
