"""Rank 0's side: it forks the other ranks, gives them its pool, and tells them what to run."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import select
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from typing import NoReturn

import torch

from engine.batch.runner import Fill, ForwardOutput, Step
from engine.devices.loaded_model import LoadedModel
from engine.kv.layout import PoolLayout
from engine.kv.pool import KVPool
from engine.lora.config import AdapterError
from engine.lora.files import RawAdapter
from engine.parallel import messages
from engine.parallel.distributed_ranks import DistributedRanks, Meeting
from engine.parallel.group import GATHER_TIMEOUT_S, LostRankError, Ranks
from engine.parallel.messages import (
    READY,
    Begin,
    DropAdapter,
    KeepAdapter,
    RunStep,
    WarmUp,
    encode,
    receive,
    send,
)
from engine.parallel.pools import HeldPool, LeadingPool, borrow_pool, held_pool, rank_layout
from engine.parallel.runner import ShareRunner
from engine.parallel.shared_ranks import SharedRanks
from protocol.config import ServeConfig

log = logging.getLogger(__name__)

_PR_SET_PDEATHSIG = 1
_POLLRDHUP = 0x2000

_BUILD_S = 60.0
"""A rank may have its runner, or an adapter, so much later than rank 0."""

Follow = Callable[[Ranks, socket.socket], None]
"""Be one of the other ranks: with its place and its line to rank 0."""


Join = Callable[[int], Ranks]
"""Makes a rank's place, in its own process."""


def join_by(device: str, size: int) -> Join:
    """Return how `size` ranks on the same kind of device join: in shared memory on CPUs, by NCCL on GPUs, of
    which each takes that of its number.
    """
    if device == "cpu":
        first = SharedRanks(size)
        return lambda rank: first.other(rank)
    meeting = Meeting()
    return lambda rank: DistributedRanks(size, rank, meeting, torch.device(device, rank))


class Leader:
    """The other ranks of this process' worker. They end when it closes or ends, in whatever way."""

    def __init__(self, size: int, follow: Follow, join: Join | None = None) -> None:
        """Forks them. This process must have one thread, which lives as long as the process, and must not
        have started CUDA.
        """
        join = join or join_by("cpu", size)
        self.ranks = join(0)
        self.held: list[HeldPool] = []
        """The ranks' pools, if each has its own."""
        self.on_lost: Callable[[], None] = lambda: None
        """Called in a thread when a rank has ended before `close`."""
        self._closing = False
        self._links: list[socket.socket] = []
        self._pids: list[int] = []
        for rank in range(1, size):
            ours, theirs = socket.socketpair()
            parent, pid = os.getpid(), os.fork()
            if pid == 0:
                for inherited in (ours, *self._links):
                    inherited.close()
                _follow(follow, parent, join, rank, theirs)
            theirs.close()
            ours.settimeout(GATHER_TIMEOUT_S)
            self._links.append(ours)
            self._pids.append(pid)

    def lend(self, fd: int, patience_s: float) -> None:
        """Have all ranks map the pool's file, for which they must have loaded the model: that takes
        `patience_s` at most. Raises LostRankError.
        """
        for link in self._links:
            with _told(link, patience_s):
                socket.send_fds(link, [READY], [fd])
        self._await(patience_s)

    def pool(self, layout: PoolLayout, num_blocks: int, device: torch.device) -> LeadingPool:
        """Make rank 0's pool, where ranks have pools of their own."""
        return LeadingPool(layout, num_blocks, device, self.ranks.size, lambda told: self.tell(encode(told)))

    def runner(
        self, config: ServeConfig, loaded: LoadedModel, pool: KVPool, hidden_layers: tuple[int, ...]
    ) -> LeadingRunner:
        """Make the runner of all ranks over the pool, which is lent, or `pool`'s. Raises LostRankError,
        UnsupportedModelError.
        """
        begin = Begin(pool.num_blocks, pool.segments, hidden_layers)
        self.tell(encode(begin))
        if isinstance(pool, LeadingPool):
            self._hold(pool, loaded.device, config.start_timeout)
        runner = LeadingRunner(self, config, loaded, pool, hidden_layers)
        self._await(_BUILD_S)
        if loaded.adapters is not None:
            loaded.adapters.share(self)
        self.watch()
        return runner

    def _hold(self, pool: LeadingPool, device: torch.device, patience_s: float) -> None:
        """Map the other ranks' pools, for which they load the model: that takes `patience_s` at most."""
        size = self.ranks.size
        self.held = [held_pool(pool.memory, pool.whole, size, 0)]
        for rank, link in enumerate(self._links, start=1):
            with _told(link, patience_s):
                blocks = borrow_pool(rank_layout(pool.whole, size, rank), pool.num_blocks, device, link)
            if blocks is None:
                raise _lost_at_start()
            self.held.append(held_pool(blocks, pool.whole, size, rank))

    def watch(self) -> None:
        """From now on gathers fail, and `on_lost` is called, when a rank has ended."""
        threading.Thread(target=self._watch, name="ranks", daemon=True).start()

    def tell(self, message: bytes) -> None:
        """Raises LostRankError."""
        for link in self._links:
            with _told(link, GATHER_TIMEOUT_S):
                send(link, message)

    def keep(self, slot: int, path: str, raw: RawAdapter) -> None:
        """As `OtherTables.keep`, on all other ranks or on none. Raises LostRankError, too."""
        self.tell(encode(KeepAdapter(slot, path, raw)))
        errors = []
        for link in self._links:
            with _told(link, _BUILD_S):
                answer = receive(link, messages.answers)
            if answer is None:
                raise LostRankError("a rank has ended while it loaded an adapter; see its log")
            errors += [answer.error] if answer.error else []
        if errors:
            self.drop(slot)
            raise AdapterError(errors[0])

    def drop(self, slot: int) -> None:
        """As `OtherTables.drop`. Raises LostRankError."""
        self.tell(encode(DropAdapter(slot)))

    def _await(self, patience_s: float) -> None:
        for link in self._links:
            with _told(link, patience_s):
                if not link.recv(len(READY)):
                    raise _lost_at_start()

    def _watch(self) -> None:
        poll = select.poll()
        for link in self._links:
            poll.register(link, _POLLRDHUP)
        poll.poll()
        if not self._closing:
            log.error("a rank of this worker has ended")
            self.ranks.give_up()
            self.on_lost()

    def close(self) -> None:
        """End the other ranks. Idempotent."""
        self._closing = True
        for link in self._links:
            with contextlib.suppress(OSError):
                link.shutdown(socket.SHUT_RDWR)
        for pid in self._pids:
            os.kill(pid, signal.SIGKILL)  # also one that is stopped, or waits for the others
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)
        self._pids = []


class LeadingRunner(ShareRunner):
    """Runs a model on all ranks: rank 0 tells the others, and does its own part."""

    def __init__(
        self,
        leader: Leader,
        config: ServeConfig,
        loaded: LoadedModel,
        pool: KVPool,
        hidden_layers: tuple[int, ...],
    ) -> None:
        super().__init__(config, loaded, pool, leader.ranks, hidden_layers)
        self._leader = leader

    def warm_up(self) -> float:
        self._leader.tell(encode(WarmUp()))
        return super().warm_up()

    def run(self, step: Step, fill: Fill | None = None) -> ForwardOutput:
        """As `Runner.run`. Raises LostRankError."""
        self._leader.tell(encode(RunStep([*step.batch], [*step.logit_rows], step.wants_hidden)))
        return super().run(step)


def _lost_at_start() -> LostRankError:
    return LostRankError("a rank has ended while it started; see its log")


@contextlib.contextmanager
def _told(link: socket.socket, timeout_s: float) -> Iterator[None]:
    link.settimeout(timeout_s)
    try:
        yield
    except OSError as error:
        raise LostRankError(f"a rank does not answer: {error}") from error


def _follow(follow: Follow, parent: int, join: Join, rank: int, link: socket.socket) -> NoReturn:
    """Follow rank 0 in a forked process."""
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() == parent:
            follow(join(rank), link)
    except BaseException:
        log.exception("rank %d failed", rank)
        os._exit(1)
    finally:
        os._exit(0)
