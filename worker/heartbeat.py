"""The heartbeat: a worker's state at a steady pace, from a thread of its own.

The same thread watches the line to the router. A worker whose router is gone has nobody to serve and nobody
to end it, so it ends itself.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

import zmq
from zmq.utils.monitor import recv_monitor_message

from messaging.sockets import connect_dealer
from protocol.codec import encode
from protocol.messages import WorkerState
from worker.parts import WorkerParts

log = logging.getLogger(__name__)

HEARTBEAT_INTERVAL_S = 0.25
"""An eighth of the default `--worker-timeout`: a few late ones are no alarm."""

ROUTER_GRACE_S = 10.0
"""Seconds without a connection to the router after which a worker ends itself."""

_CONNECTED = zmq.EVENT_HANDSHAKE_SUCCEEDED
_LOST = (zmq.EVENT_DISCONNECTED, zmq.EVENT_CLOSED)


class Heartbeat:
    """`on_router_lost` is called in the heartbeat's thread, at most once."""

    def __init__(self, parts: WorkerParts, endpoint: str, on_router_lost: Callable[[], None]) -> None:
        self._parts = parts
        self._endpoint = endpoint
        self._on_router_lost = on_router_lost
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
        socket = connect_dealer(parts.context, parts.keys, self._endpoint, f"{parts.worker_id}/hb")
        monitor = socket.get_monitor_socket(_CONNECTED | zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED)
        lost_since: float | None = None
        try:
            while not self._stop.wait(HEARTBEAT_INTERVAL_S):
                lost_since = _follow(monitor, lost_since)
                if lost_since is None:
                    if parts.engine is not None:
                        _beat(socket, parts.state())
                elif time.monotonic() - lost_since > ROUTER_GRACE_S:
                    log.error("the router has been gone for %.0f s; this worker ends", ROUTER_GRACE_S)
                    self._on_router_lost()
                    return
        finally:
            socket.disable_monitor()
            monitor.close()
            socket.close()


def _beat(socket: zmq.Socket[bytes], state: WorkerState) -> None:
    try:
        socket.send(encode(state), zmq.NOBLOCK)
    except zmq.Again:
        log.warning("the router does not take heartbeats")


def _follow(monitor: zmq.Socket[bytes], lost_since: float | None) -> float | None:
    """Read the connection's events; returns since when it has been lost, or None while it stands."""
    while monitor.poll(0):
        event = recv_monitor_message(monitor)["event"]
        if event == _CONNECTED:
            lost_since = None
        elif event in _LOST and lost_since is None:
            lost_since = time.monotonic()
    return lost_since
