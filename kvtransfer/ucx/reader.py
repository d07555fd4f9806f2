"""The receiver's end of a connection: reads pieces from the sender's pool into ours."""

from __future__ import annotations

import select
import threading
import time
from contextlib import ExitStack

import numpy as np

from kvtransfer.channel import Channel
from kvtransfer.device import settle
from kvtransfer.extents import BlockIndices
from kvtransfer.interface import RegisteredPool
from kvtransfer.leases import WriteGate
from kvtransfer.ucx.agent import Agent, Memory, Transfer
from kvtransfer.ucx.limbo import Limbo

_FIRST_PAUSE_S = 50e-6
_PAUSE_GROWTH = 1.06
_LONGEST_PAUSE_S = 2e-3
_LOOK_S = 10e-3
"""How often the connection is looked at during a read: its end means that the sender has given up on us."""


class UcxReader:
    """Reads blocks of `source`, in the agent of this name and metadata, into blocks of `target`.

    It may be used by one thread at a time. What it holds in NIXL goes with `close`, or when its last transfer
    is over, whichever is later.
    """

    def __init__(
        self,
        agent: Agent,
        limbo: Limbo,
        channel: Channel,
        name: str,
        metadata: bytes,
        source: Memory,
        pool: RegisteredPool,
        target: Memory,
        progress_timeout_s: float,
    ) -> None:
        self._agent = agent
        self._pool = pool
        self._limbo = limbo
        self._channel = channel
        self._progress_timeout_s = progress_timeout_s
        self._lock = threading.Lock()
        self._uses = 1
        with ExitStack() as undo:
            agent.register(target)
            undo.callback(agent.deregister, target)
            self._remote = agent.connect(name, metadata)
            undo.callback(agent.disconnect, self._remote)
            self._ours = agent.prepare(target)
            undo.callback(agent.release, self._ours)
            self._theirs = agent.prepare(source, self._remote)
            undo.callback(agent.release, self._theirs)
            self._undo = undo.pop_all()

    def warm_up(self, source: Memory, target: Memory, deadline: float) -> None:
        """Read one block of `source` into `target`: it is the first read that makes UCX connect."""
        first = np.zeros(1, dtype=np.int32)
        with ExitStack() as held:
            ours = self._agent.prepare(target)
            held.callback(self._agent.release, ours)
            theirs = self._agent.prepare(source, self._remote)
            held.callback(self._agent.release, theirs)
            self._finish(self._agent.read(self._remote, theirs, first, ours, first), held, deadline)

    def read(self, sources: BlockIndices, targets: BlockIndices, gate: WriteGate | None) -> bool:
        if gate is None:
            return False
        with ExitStack() as held:
            if not held.enter_context(gate.writing()):
                return False
            if len(sources):
                settle(self._pool.device)
                theirs, ours = (np.ascontiguousarray(side, dtype=np.int32) for side in (sources, targets))
                transfer = self._agent.read(self._remote, self._theirs, theirs, self._ours, ours)
                self._finish(transfer, held, time.monotonic() + self._progress_timeout_s)
        return True

    def close(self) -> None:
        with self._lock:
            self._uses -= 1
            if self._uses:
                return
        self._undo.close()

    def _finish(self, transfer: Transfer, held: ExitStack, deadline: float) -> None:
        """Wait for the transfer; if that ends before the transfer does, `held` is kept until then."""
        try:
            self._wait(transfer, deadline)
        except BaseException:
            if not transfer.is_over:
                with self._lock:
                    self._uses += 1
                kept = held.pop_all()
                kept.callback(self.close)
                self._limbo.add(transfer, kept)
            raise

    def _wait(self, transfer: Transfer, deadline: float) -> None:
        """Ask at intervals that grow with the time waited: a short read ends soon, a long one costs little.

        Asking also does UCX's work, so the bytes that are there are taken in by this thread, or by NIXL's own
        while this one sleeps.
        """
        pause = _FIRST_PAUSE_S
        look_at = time.monotonic() + _LOOK_S
        while not self._agent.poll(transfer):
            now = time.monotonic()
            if now > deadline:
                raise TimeoutError("the peer made no progress in time")
            if now > look_at:
                look_at = now + _LOOK_S
                self._look()
            time.sleep(pause)
            pause = min(pause * _PAUSE_GROWTH, _LONGEST_PAUSE_S)

    def _look(self) -> None:
        """Raises ConnectionResetError if the sender has hung up, StoppedError if our own side is closing."""
        try:
            hung_up = self._channel.wait(select.POLLRDHUP, time.monotonic())
        except TimeoutError:
            return
        if hung_up:
            raise ConnectionResetError("the sender hung up during a read")
