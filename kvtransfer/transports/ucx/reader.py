"""The receiver's end of a connection: reads pieces, and then the sender's word, from the sender's memory."""

from __future__ import annotations

import threading
import time
from contextlib import ExitStack
from dataclasses import replace

import numpy as np

from kvtransfer.blocks.extents import BlockIndices
from kvtransfer.framing.channel import Channel
from kvtransfer.interface import RegisteredPool
from kvtransfer.leases.gate import WriteGate
from kvtransfer.transports.transport import PieceReader
from kvtransfer.transports.ucx.agent import Agent, Memory, Remote, Transfer
from kvtransfer.transports.ucx.messages import Introduction
from kvtransfer.transports.ucx.orphans import OrphanedReads
from kvtransfer.transports.ucx.words import ConnectionWord

_FIRST_PAUSE_S = 50e-6
_PAUSE_GROWTH = 1.06
_LONGEST_PAUSE_S = 2e-3
_LOOK_S = 10e-3
"""Seconds between checks of the connection during a read: it is closed if the sender has given us up."""
_FIRST = np.zeros(1, dtype=np.int32)


class UcxReader(PieceReader):
    """Reads blocks of the sender's `source` into blocks of our `target`, and the sender's word into `word`.

    For one thread at a time. Its resources are released at `close`, or when its last transfer is over,
    whichever is later.
    """

    def __init__(
        self,
        agent: Agent,
        orphans: OrphanedReads,
        channel: Channel,
        sender: Introduction,
        source: Memory,
        pool: RegisteredPool,
        word: ConnectionWord,
        probe: Memory,
    ) -> None:
        """`probe` is registered memory of the pool's kind, for `warm_up`."""
        self._agent = agent
        self._probe = probe
        self._orphans = orphans
        self._channel = channel
        self._lock = threading.Lock()
        self._uses = 1
        self._source = source
        self._word = word
        self._token = sender.token
        target = Memory.of(pool)
        with ExitStack() as undo:
            undo.callback(word.release)
            agent.register(target)
            undo.callback(agent.deregister, target)
            self._remote = agent.connect(sender.agent, sender.metadata)
            undo.callback(agent.disconnect, self._remote)
            self._ours = self._prepare(undo, target)
            self._theirs = self._prepare(undo, source, self._remote)
            self._our_word = self._prepare(undo, word.memory)
            self._their_word = self._prepare(
                undo, replace(word.memory, address=sender.word_address), self._remote
            )
            self._undo = undo.pop_all()

    def warm_up(self, deadline: float) -> None:
        """Read the start of the source, and the word: UCX connects at the first read.

        The target is memory of the kind that blocks are read into: a route between GPUs may not reach the
        host.
        """
        nbytes = min(self._probe.block_bytes, self._source.block_bytes)
        with ExitStack() as held:
            ours = self._prepare(held, replace(self._probe, block_bytes=nbytes))
            theirs = self._prepare(
                held, replace(self._source, block_bytes=nbytes, num_blocks=1), self._remote
            )
            self._finish(self._agent.read(self._remote, theirs, _FIRST, ours, _FIRST), held, deadline)
        self._confirm(deadline)

    def read(self, sources: BlockIndices, targets: BlockIndices, gate: WriteGate) -> bool:
        deadline = self._channel.progress_deadline()
        with ExitStack() as held:
            if not held.enter_context(gate.writing()):
                return False
            if not len(sources):
                return True
            theirs, ours = (np.ascontiguousarray(side, dtype=np.int32) for side in (sources, targets))
            transfer = self._agent.read(self._remote, self._theirs, theirs, self._ours, ours)
            self._finish(transfer, held, deadline)
        self._confirm(deadline)
        return True

    def close(self) -> None:
        with self._lock:
            self._uses -= 1
            if self._uses:
                return
        self._undo.close()

    def _prepare(self, held: ExitStack, memory: Memory, remote: Remote | None = None) -> int:
        prepared = self._agent.prepare(memory, remote)
        held.callback(self._agent.release, prepared)
        return prepared

    def _confirm(self, deadline: float) -> None:
        """Raise ConnectionResetError if the sender gave us up: it may have reused its blocks."""
        self._word.write(0)
        transfer = self._agent.read(self._remote, self._their_word, _FIRST, self._our_word, _FIRST)
        with ExitStack() as held:
            self._finish(transfer, held, deadline)
        if self._word.read() != self._token:
            raise ConnectionResetError("the sender gave the connection up during a read")

    def _finish(self, transfer: Transfer, held: ExitStack, deadline: float) -> None:
        """Wait for the transfer. If the wait fails first, `held` is kept until the transfer is over."""
        try:
            self._wait(transfer, deadline)
        except BaseException:
            if not transfer.is_over:
                with self._lock:
                    self._uses += 1
                kept = held.pop_all()
                kept.callback(self.close)
                self._orphans.add(transfer, kept)
            raise

    def _wait(self, transfer: Transfer, deadline: float) -> None:
        """Poll at growing intervals: a short read ends soon, a long one costs little CPU.

        A poll also makes UCX progress. While this thread sleeps, NIXL's progress thread does that.
        """
        pause = _FIRST_PAUSE_S
        look_at = time.monotonic() + _LOOK_S
        while not self._agent.poll(transfer):
            now = time.monotonic()
            if now > deadline:
                raise TimeoutError("the peer made no progress in time")
            if now > look_at:
                look_at = now + _LOOK_S
                if self._channel.hung_up():
                    raise ConnectionResetError("the sender hung up during a read")
            time.sleep(pause)
            pause = min(pause * _PAUSE_GROWTH, _LONGEST_PAUSE_S)
