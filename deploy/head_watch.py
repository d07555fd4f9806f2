"""Detects the end of a joined Ray cluster, which Ray itself reports only after a minute."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable

INTERVAL_S = 0.5
_TIMEOUT_S = 1.0
REFUSED_S = 1.0
"""A head that refuses connections for this long has ended."""

UNREACHABLE_S = 20.0
"""A head that is unreachable for this long counts as lost. Its nodes do the same (deploy/node.sh)."""


class HeadWatch(threading.Thread):
    """Connects to the head's control store again and again; calls `on_lost` once, with the reason.

    It has its own thread because calls of Ray may hang by then.
    """

    def __init__(self, host: str, port: int, on_lost: Callable[[str], None]) -> None:
        super().__init__(name="head-watch", daemon=True)
        self._head = (host, port)
        self._on_lost = on_lost
        self._stop_requested = threading.Event()

    def stop(self) -> None:
        self._stop_requested.set()

    def run(self) -> None:
        answered = time.monotonic()
        while not self._stop_requested.wait(INTERVAL_S):
            try:
                socket.create_connection(self._head, _TIMEOUT_S).close()
                answered = time.monotonic()
            except OSError as error:
                patience = REFUSED_S if isinstance(error, ConnectionRefusedError) else UNREACHABLE_S
                if time.monotonic() - answered > patience:
                    self._on_lost(f"the Ray cluster at {self._head[0]}:{self._head[1]} has ended ({error})")
                    return
