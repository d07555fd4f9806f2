"""The receiver's end of a UCX connection: reads of pieces, then of a word, in the sender's memory.

Each connection has a word in the sender's memory, which holds the connection's token until the sender gives
the connection up. The sender does so before it reuses the blocks. A receiver reads the blocks of a piece,
then the word: if the word is still the token, the blocks did not change during their read.
"""

from __future__ import annotations

import logging
import mmap
import secrets
import threading
import time
from contextlib import ExitStack
from dataclasses import replace
from typing import Annotated, Literal

import msgspec
import numpy as np
from msgspec import Meta

from kvtransfer.blocks.extents import BlockIndices
from kvtransfer.interface import RegisteredPool
from kvtransfer.lease import WriteGate
from kvtransfer.messages import Channel, Reason
from kvtransfer.transports.transport import PieceReader
from kvtransfer.transports.ucx_agent import Agent, Memory, Remote, Transfer

WORD_BYTES = 8
MAX_WORDS = 8192
MAX_METADATA_BYTES = 48 * 1024


class Introduction(msgspec.Struct, frozen=True, tag="ucx"):
    """Sender to receiver: its pool's address, and the `ConnectionWord`'s address and token.

    `metadata` is NIXL's description of the agent: its UCX addresses and its memory's remote keys.
    """

    agent: Annotated[str, Meta(min_length=1, max_length=256)]
    metadata: Annotated[bytes, Meta(min_length=1, max_length=MAX_METADATA_BYTES)]
    address: Annotated[int, Meta(ge=0, lt=2**62)]
    kind: Literal["cpu", "cuda"]
    device_id: Annotated[int, Meta(ge=0, lt=1024)]
    word_address: Annotated[int, Meta(ge=0, lt=2**62)]
    token: Annotated[int, Meta(ge=1, lt=2**62)]


class UcxWelcome(msgspec.Struct, frozen=True, tag="ucx-welcome"):
    """Receiver to sender: reading from the pool works, or fails (`refusal`)."""

    refusal: Reason = ""


class Words:
    """A page of words. The caller registers `memory`, which holds all of them."""

    def __init__(self) -> None:
        self._values = np.frombuffer(mmap.mmap(-1, MAX_WORDS * WORD_BYTES), dtype=np.uint64)
        self.memory = Memory(int(self._values.ctypes.data), WORD_BYTES, MAX_WORDS)
        self._free = list(range(MAX_WORDS))

    def take(self) -> ConnectionWord:
        """Return an unused word. Raises OSError if all are in use."""
        try:
            index = self._free.pop()
        except IndexError:
            raise OSError(f"more than {MAX_WORDS} connections") from None
        return ConnectionWord(self._values[index : index + 1], index, self._free)


class ConnectionWord:
    """One word, from `Words.take` to `release`. Tokens are never reused."""

    def __init__(self, value: np.ndarray, index: int, free: list[int]) -> None:
        self.token = secrets.randbits(61) + 1
        self.memory = Memory(int(value.ctypes.data), WORD_BYTES, 1)
        self._value = value
        self._index: int | None = index
        self._free = free
        self._releasing = threading.Lock()

    def write(self, value: int) -> None:
        self._value[0] = value

    def read(self) -> int:
        return int(self._value[0])

    def release(self) -> None:
        """Zero the word and free it for others. Idempotent, for any thread."""
        with self._releasing:
            if self._index is not None:
                self.write(0)
                self._free.append(self._index)
                self._index = None


logger = logging.getLogger("tandem.kvtransfer")

_ORPHAN_LOOK_S = 0.02


class OrphanedReads:
    """Abandoned reads: a thread per read polls it until it is over, then releases its resources.

    Every read ends at some time: UCX gives up a dead peer, and a frozen peer continues or dies.
    """

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._held: dict[Transfer, tuple[ExitStack, threading.Thread]] = {}
        self._closing = threading.Event()

    def __len__(self) -> int:
        return len(self._held)

    def add(self, transfer: Transfer, held: ExitStack) -> None:
        """Close `held` as soon as the transfer is over."""
        logger.warning("a read from %s was given up and is not over", transfer.remote.name)
        watcher = threading.Thread(target=self._watch, args=(transfer,), name="kv-ucx-orphan", daemon=True)
        self._held[transfer] = held, watcher
        watcher.start()

    def stop(self) -> None:
        """End the threads, even if reads are still running."""
        self._closing.set()
        for _, watcher in list(self._held.values()):
            watcher.join()

    def release(self) -> None:
        """Close everything that is still held, after the agent is closed."""
        for transfer in list(self._held):
            self._close(transfer)

    def _watch(self, transfer: Transfer) -> None:
        while not self._closing.wait(_ORPHAN_LOOK_S):
            try:
                over = self._agent.poll(transfer)
            except OSError as error:
                logger.info("a read that was given up failed: %s", error)
                over = transfer.is_over
            if over:
                self._close(transfer)
                return

    def _close(self, transfer: Transfer) -> None:
        held, _ = self._held.pop(transfer)
        try:
            held.close()
        except Exception:
            logger.exception("what a given-up read from %s held was not released", transfer.remote.name)


_FIRST_PAUSE_S = 50e-6
_PAUSE_GROWTH = 1.06
_LONGEST_PAUSE_S = 2e-3
_LOOK_S = 10e-3
"""Seconds between checks of the connection during a read: the sender closes it to give the receiver up."""
_FIRST = np.zeros(1, dtype=np.int32)


class UcxReader(PieceReader):
    """A reader of the sender's `source` into our `pool`, and of the sender's word into `word`.

    For one thread at a time. Resources are released at `close` or after the last transfer, whichever is
    later.
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
        """Read the start of the source, and the word, because UCX connects at the first read.

        The target is memory of the pool's kind: a route between GPUs may not reach the host.
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
        """Raise ConnectionResetError if the sender gave the connection up: it may have reused its blocks."""
        self._word.write(0)
        transfer = self._agent.read(self._remote, self._their_word, _FIRST, self._our_word, _FIRST)
        with ExitStack() as held:
            self._finish(transfer, held, deadline)
        if self._word.read() != self._token:
            raise ConnectionResetError("the sender gave the connection up during a read")

    def _finish(self, transfer: Transfer, held: ExitStack, deadline: float) -> None:
        """Wait for the transfer. If waiting fails first, keep `held` until the transfer is over."""
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
        """Poll at growing intervals: a short read is noticed soon, and a long one costs little CPU.

        A poll also lets UCX progress; while this thread sleeps, NIXL's progress thread does so.
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
