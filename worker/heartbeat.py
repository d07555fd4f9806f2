"""The heartbeat: a worker's state at a steady pace to all routers, from a thread of its own.

The same thread watches the lines to the routers. A worker whose routers are gone has nobody to serve and
nobody to end it, so it ends itself.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable

import zmq
from zmq.utils.monitor import recv_monitor_message

from messaging.sockets import connect_dealer
from protocol.codec import encode
from worker.link import RouterLink
from worker.parts import WorkerParts

log = logging.getLogger(__name__)

HEARTBEAT_INTERVAL_S = 0.25
"""An eighth of the default `--worker-timeout`: a few late ones are no alarm."""

ROUTER_GRACE_S = 10.0
"""Seconds without a connection to any router after which a worker ends itself."""

_CONNECTED = zmq.EVENT_HANDSHAKE_SUCCEEDED
_LOST = (zmq.EVENT_DISCONNECTED, zmq.EVENT_CLOSED)


class Heartbeat:
    """`on_routers_lost` is called in the heartbeat's thread, at most once."""

    def __init__(
        self, parts: WorkerParts, links: Iterable[RouterLink], on_routers_lost: Callable[[], None]
    ) -> None:
        self._parts = parts
        self._links = links
        self._on_routers_lost = on_routers_lost
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        parts = self._parts
        lines = [_Line(parts, link) for link in self._links]
        try:
            while not self._stop.wait(HEARTBEAT_INTERVAL_S):
                for line in lines:
                    line.follow()
                standing = [line for line in lines if line.lost_since is None]
                if standing:
                    if parts.engine is not None:
                        raw = encode(parts.state())
                        for line in standing:
                            line.beat(raw)
                elif time.monotonic() - max(line.lost_since or 0.0 for line in lines) > ROUTER_GRACE_S:
                    log.error("every router has been gone for %.0f s; this worker ends", ROUTER_GRACE_S)
                    self._on_routers_lost()
                    return
        finally:
            for line in lines:
                line.close()


class _Line:
    """The heartbeat's own connection to a router; `lost_since` is None while it stands, or never did yet."""

    def __init__(self, parts: WorkerParts, link: RouterLink) -> None:
        self._link = link
        self._socket = connect_dealer(parts.context, parts.keys, link.endpoint, f"{parts.worker_id}/hb")
        events = _CONNECTED | zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED
        self._monitor = self._socket.get_monitor_socket(events)
        self.lost_since: float | None = None

    def follow(self) -> None:
        """Read the connection's events."""
        while self._monitor.poll(0):
            event = recv_monitor_message(self._monitor)["event"]
            if event == _CONNECTED:
                self.lost_since, self._link.stands = None, True
            elif event in _LOST and self.lost_since is None:
                self.lost_since, self._link.stands = time.monotonic(), False

    def beat(self, raw: bytes) -> None:
        try:
            self._socket.send(raw, zmq.NOBLOCK)
        except zmq.Again:
            log.warning("the router does not take heartbeats")

    def close(self) -> None:
        self._socket.disable_monitor()
        self._monitor.close()
        self._socket.close()
