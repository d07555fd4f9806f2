"""The heartbeat: a thread that sends a worker's state to all routers at a steady pace.

The heartbeat continues during a long step of the loop, and reports a stuck loop. The same thread watches the
connections to the routers. A worker whose routers are gone has nothing to serve, and no router ends it, so it
ends itself.
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
from protocol.config import ServeConfig
from protocol.costs import StepCosts
from protocol.worker_to_router import HEARTBEAT_INTERVAL_S, WorkerState
from worker.link import RouterLink
from worker.parts import LoopProgress, WorkerParts

log = logging.getLogger(__name__)

ROUTER_GRACE_S = 10.0
"""Seconds without a connection to any router after which a worker ends itself."""

_CONNECTED = zmq.EVENT_HANDSHAKE_SUCCEEDED
_LOST = (zmq.EVENT_DISCONNECTED, zmq.EVENT_CLOSED)

BLOCKED_S = 10.0
"""[s] Time without CPU use after which a loop counts as stuck. The loop waits 0.25 s for messages, at most
this long for another rank, and never for disks and peers, which have threads of their own.
"""

BUSY_S = 60.0
"""[s] Time that any turn may take: it may compile code, or share its core with many processes."""

LONGEST_STEPS = 10.0
"""Multiple of the worker's longest step that a turn may take, if that is longer. On cores shared by five busy
processes each, the slowest turns took twice the longest step (29 M parameters, float32).
"""

_IDLE_SHARE = 0.01
"""Share of a core below which the loop counts as waiting."""


class Heartbeat:
    """The sender of heartbeats. It calls `on_routers_lost` in its own thread, at most once."""

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
            self._log_stall(stalled_s)
        return msgspec.structs.replace(state, stalled_s=stalled_s)

    def _log_stall(self, stalled_s: float) -> None:
        if not stalled_s:
            log.warning("the loop goes on")
            return
        frame = sys._current_frames().get(self._parts.progress.thread or 0)
        where = "".join(traceback.format_stack(frame)) if frame is not None else "?"
        log.error("the loop has been stuck for %.0f s, at:\n%s", stalled_s, where)


class _RouterConnection:
    """The heartbeat's own connection to a router. `lost_since` is None while it is connected."""

    def __init__(self, parts: WorkerParts, link: RouterLink) -> None:
        self._link = link
        self._socket = connect_dealer(parts.context, parts.keys, link.endpoint, f"{parts.worker_id}/hb")
        events = _CONNECTED | zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED
        self._monitor = self._socket.get_monitor_socket(events)
        self.lost_since: float | None = None

    def follow(self) -> None:
        while self._monitor.poll(0):
            event = recv_monitor_message(self._monitor)["event"]
            if event == _CONNECTED:
                self.lost_since, self._link.is_connected = None, True
            elif event in _LOST and self.lost_since is None:
                self.lost_since, self._link.is_connected = time.monotonic(), False

    def beat(self, raw: bytes) -> None:
        try:
            self._socket.send(raw, zmq.NOBLOCK)
        except zmq.Again:
            log.warning("the router does not take heartbeats")

    def close(self) -> None:
        self._socket.disable_monitor()
        self._monitor.close()
        self._socket.close()


class StallWatch:
    """The watch over the loop's progress. Belongs to the heartbeat's thread."""

    def __init__(self, progress: LoopProgress) -> None:
        self._progress = progress
        self._turn = (progress.thread, progress.turns)
        self._core_s = 0.0
        self._stood_s = self._waited_s = 0.0

    def look(self, passed_s: float, longest_step_s: float) -> float:
        """Return the time that the loop has spent in its turn if that is too long, else 0.

        `passed_s` is the time since the last call, without times when this process did not run.
        """
        progress = self._progress
        turn, core_s = (progress.thread, progress.turns), progress.core_s()
        if turn != self._turn or progress.thread is None:
            self._turn, self._stood_s, self._waited_s = turn, 0.0, 0.0
        else:
            self._stood_s += passed_s
            waits = core_s - self._core_s < _IDLE_SHARE * passed_s
            self._waited_s = self._waited_s + passed_s if waits else 0.0
        self._core_s = core_s
        is_stuck = self._waited_s > BLOCKED_S or self._stood_s > max(BUSY_S, LONGEST_STEPS * longest_step_s)
        return self._stood_s if is_stuck else 0.0


def longest_step_s(costs: StepCosts, config: ServeConfig, max_model_len: int, total_blocks: int) -> float:
    """Return the time of the largest step: a full batch that fills the pool, with a prompt's last chunk."""
    context = costs.room_tokens(total_blocks, config.block_size)
    prompt_s = costs.chunks_s(costs.chunk_tokens, max_model_len, costs.chunk_tokens)
    return costs.decode_s(config.max_num_seqs, context) + prompt_s
