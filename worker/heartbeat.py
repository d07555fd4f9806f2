"""The heartbeat: sends a worker's state to all routers at a steady pace, from a thread of its own.

The heartbeat goes on during a long step of the loop, and says if the loop is stuck. The same thread watches
the connections to the routers. A worker whose routers are gone has no requests to serve, and no router to
end it, so it ends itself.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable

import msgspec
import zmq
from zmq.utils.monitor import recv_monitor_message

from engine.engine import Engine
from messaging.sockets import connect_dealer
from protocol.codec import encode
from protocol.worker_to_router import WorkerState
from worker.link import RouterLink
from worker.parts import WorkerParts
from worker.progress import StallWatch, longest_step_s

log = logging.getLogger(__name__)

HEARTBEAT_INTERVAL_S = 0.25
"""An eighth of the default `--worker-timeout`, so that a few late heartbeats raise no alarm."""

ROUTER_GRACE_S = 10.0
"""Seconds without a connection to any router after which a worker ends itself."""

_CONNECTED = zmq.EVENT_HANDSHAKE_SUCCEEDED
_LOST = (zmq.EVENT_DISCONNECTED, zmq.EVENT_CLOSED)


class Heartbeat:
    """Sends the heartbeats. It calls `on_routers_lost` in its own thread, at most once."""

    def __init__(
        self, parts: WorkerParts, links: Iterable[RouterLink], on_routers_lost: Callable[[], None]
    ) -> None:
        self._parts = parts
        self._links = links
        self._on_routers_lost = on_routers_lost
        self._stalls = StallWatch(parts.progress)
        self._is_stalled = False
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
        lines = [_RouterConnection(parts, link) for link in self._links]
        last = time.monotonic()
        try:
            while not self._stop.wait(HEARTBEAT_INTERVAL_S):
                # A pause of the whole process stops the loop, too, and is not the loop's fault.
                last, passed_s = (now := time.monotonic()), min(now - last, 2 * HEARTBEAT_INTERVAL_S)
                for line in lines:
                    line.follow()
                standing = [line for line in lines if line.lost_since is None]
                if standing:
                    if parts.engine is not None:
                        raw = encode(self._state(parts.engine, passed_s))
                        for line in standing:
                            line.beat(raw)
                elif time.monotonic() - max(line.lost_since or 0.0 for line in lines) > ROUTER_GRACE_S:
                    log.error("every router has been gone for %.0f s; this worker ends", ROUTER_GRACE_S)
                    self._on_routers_lost()
                    return
        finally:
            for line in lines:
                line.close()

    def _state(self, engine: Engine, passed_s: float) -> WorkerState:
        state = self._parts.state()
        longest_s = longest_step_s(state.costs, self._parts.config, engine.max_model_len, state.total_blocks)
        stalled_s = self._stalls.look(passed_s, longest_s)
        if bool(stalled_s) != self._is_stalled:
            self._is_stalled = bool(stalled_s)
            self._say(stalled_s)
        return msgspec.structs.replace(state, stalled_s=stalled_s)

    def _say(self, stalled_s: float) -> None:
        if not stalled_s:
            log.warning("the loop goes on")
            return
        frame = sys._current_frames().get(self._parts.progress.thread or 0)
        where = "".join(traceback.format_stack(frame)) if frame is not None else "?"
        log.error("the loop has been stuck for %.0f s, at:\n%s", stalled_s, where)


class _RouterConnection:
    """The heartbeat's own connection to a router. `lost_since` is None while connected."""

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
