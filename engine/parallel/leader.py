"""Rank 0's side: forks the other ranks, lends them its KV pool, and tells them what to run."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import select
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

import torch

from engine.batch.runner import Fill, ForwardOutput, Step
from engine.devices.loaded_model import LoadedModel
from engine.kv.layout import PoolLayout
from engine.kv.pool import KVPool
from engine.kv.state_slots import StateSlots
from engine.kv.tiers.host import HostMemory
from engine.lora.config import AdapterError
from engine.lora.files import RawAdapter
from engine.parallel import messages
from engine.parallel.group import (
    GATHER_TIMEOUT_S,
    DistributedRanks,
    LostRankError,
    Meeting,
    Ranks,
    SharedRanks,
)
from engine.parallel.messages import (
    READY,
    BuildRunners,
    KeepAdapter,
    RankCall,
    RunStep,
    encode,
    receive,
    send,
)
from engine.parallel.pools import (
    HeldPool,
    LeadingMemory,
    LeadingPool,
    WholeBlocks,
    borrow_pool,
    held_pool,
    rank_layout,
    share_state,
)
from engine.parallel.runner import ShareRunner
from protocol.config import ServeConfig

log = logging.getLogger(__name__)

_PR_SET_PDEATHSIG = 1
_POLLRDHUP = 0x2000

_BUILD_S = 60.0
"""The longest time that another rank may take, after rank 0, to build its runner or load an adapter."""

Follow = Callable[[Ranks, socket.socket], None]
"""A function that runs one of the other ranks, given its `Ranks` and its socket to rank 0."""


Join = Callable[[int], Ranks]
"""A function that makes the `Ranks` of a rank, in that rank's own process."""


def join_by(device: str, size: int) -> Join:
    """Return how ranks connect: by shared memory on CPUs, by NCCL on GPUs, each on its number's GPU."""
    if device == "cpu":
        first = SharedRanks(size)
        return lambda rank: first.other(rank)
    meeting = Meeting()
    return lambda rank: DistributedRanks(size, rank, meeting, torch.device(device, rank))


class Leader:
    """The other ranks of this process' worker. They end at `close`, or when this process ends in any way."""

    def __init__(self, size: int, follow: Follow, join: Join | None = None) -> None:
        """Fork the ranks. This process must have only one thread, which lives as long as the process, and
        must not have started CUDA.
        """
        join = join or join_by("cpu", size)
        self.ranks = join(0)
        self.held: list[HeldPool] = []
        """The pools of all ranks, if each has its own."""
        self.on_lost: Callable[[], None] = lambda: None
        """The function that a thread calls when a rank has ended before `close`."""
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
        """Have all ranks map the pool's file, once they have loaded the model. Raises LostRankError."""
        for link in self._links:
            with _link_timeout(link, patience_s):
                socket.send_fds(link, [READY], [fd])
        self._await(patience_s)

    def pool(self, layout: PoolLayout, num_blocks: int, device: torch.device) -> LeadingPool:
        """Make rank 0's pool, for ranks with pools of their own."""
        return LeadingPool(layout, num_blocks, device, self.ranks.size, self.call)

    def host_memory(self, pool: KVPool, num_slots: int) -> HostMemory:
        """Allocate slots for blocks of `Leader.pool`'s, on all ranks, which have built their runners."""
        assert isinstance(pool, LeadingPool)
        return LeadingMemory(pool, num_slots, self.call, self._finish_copies)

    def _finish_copies(self) -> None:
        """Wait for the copies that the other ranks were told to make. Raises LostRankError."""
        self.call("finish_copies")
        self._await(GATHER_TIMEOUT_S)

    def runner(
        self, config: ServeConfig, loaded: LoadedModel, pool: KVPool, hidden_layers: tuple[int, ...]
    ) -> LeadingRunner:
        """Make the runner of all ranks over `pool`. Raises LostRankError, UnsupportedModelError."""
        states = pool.state_slots
        window = 0 if states is None else states.layout.window
        begin = BuildRunners(pool.num_blocks, pool.segments, hidden_layers, window)
        self.broadcast(encode(begin))
        if isinstance(pool, LeadingPool):
            self._hold(pool, loaded.device, config.start_timeout)
        runner = LeadingRunner(self, config, loaded, pool, hidden_layers)
        self._await(_BUILD_S)
        if loaded.adapters is not None:
            loaded.adapters.share(self)
        if states is not None:
            self._share_states(states)
        self.watch()
        return runner

    def _share_states(self, states: StateSlots) -> None:
        """Have the other ranks change the states of their slots like rank 0."""

        def load(state_slot: int, num_tokens: int) -> None:
            self.call("load_state", state_slot, num_tokens)
            share_state(self.ranks, states, state_slot, num_tokens)

        def move(state_slot: int, first: int, places: Sequence[int]) -> None:
            self.call("move_inputs", state_slot, first, [*places])

        states.on_load, states.on_move = load, move

    def _hold(self, pool: LeadingPool, device: torch.device, patience_s: float) -> None:
        """Map the other ranks' pools. Waits up to `patience_s` for each, since they load the model first."""
        size = self.ranks.size
        self.held = [held_pool(pool.memory, pool.whole, size, 0)]
        for rank, link in enumerate(self._links, start=1):
            with _link_timeout(link, patience_s):
                blocks = borrow_pool(rank_layout(pool.whole, size, rank), pool.num_blocks, device, link)
            if blocks is None:
                raise _lost()
            self.held.append(held_pool(blocks, pool.whole, size, rank))
        pool.state_memory = WholeBlocks(pool.whole, self.held, self._finish_copies)

    def watch(self) -> None:
        """Watch the ranks from now on: when one has ended, make gathers fail and call `on_lost`."""
        threading.Thread(target=self._watch, name="ranks", daemon=True).start()

    def broadcast(self, message: bytes) -> None:
        """Send a message to all other ranks. Raises LostRankError."""
        for link in self._links:
            with _link_timeout(link, GATHER_TIMEOUT_S):
                send(link, message)

    def call(self, name: str, *arguments: Any) -> None:
        """Have all other ranks call one of their functions (`follower.py`). Raises LostRankError."""
        self.broadcast(encode(RankCall(name, [*arguments])))

    def keep(self, slot: int, path: str, raw: RawAdapter) -> None:
        """Load an adapter on all other ranks or none, like `OtherTables.keep`. Also raises LostRankError."""
        self.broadcast(encode(KeepAdapter(slot, path, raw)))
        errors = []
        for link in self._links:
            with _link_timeout(link, _BUILD_S):
                answer = receive(link, messages.answers)
            if answer is None:
                raise LostRankError("a rank has ended while it loaded an adapter; see its log")
            errors += [answer.error] if answer.error else []
        if errors:
            self.drop(slot)
            raise AdapterError(errors[0])

    def drop(self, slot: int) -> None:
        """Drop a slot's adapter on all other ranks. Raises LostRankError."""
        self.call("drop_adapter", slot)

    def _await(self, patience_s: float) -> None:
        for link in self._links:
            with _link_timeout(link, patience_s):
                if not link.recv(len(READY)):
                    raise _lost()

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
            os.kill(pid, signal.SIGKILL)  # ends stopped ranks and those in a gather, too
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)
        self._pids = []


class LeadingRunner(ShareRunner):
    """A runner of all ranks: rank 0 tells the others what to run, and does its own part."""

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
        self._leader.call("warm_up")
        return super().warm_up()

    def run(self, step: Step, fill: Fill | None = None) -> ForwardOutput:
        """Run the step on all ranks. Raises LostRankError."""
        self._leader.broadcast(encode(RunStep([*step.batch], [*step.logit_rows], step.wants_hidden)))
        return super().run(step)


def _lost() -> LostRankError:
    return LostRankError("a rank has ended; see its log")


@contextlib.contextmanager
def _link_timeout(link: socket.socket, timeout_s: float) -> Iterator[None]:
    link.settimeout(timeout_s)
    try:
        yield
    except OSError as error:
        raise LostRankError(f"a rank does not answer: {error}") from error


def _follow(follow: Follow, parent: int, join: Join, rank: int, link: socket.socket) -> NoReturn:
    """Run one of the other ranks in a forked process, and exit."""
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() == parent:
            follow(join(rank), link)
    except BaseException:
        log.exception("rank %d failed", rank)
        os._exit(1)
    finally:
        os._exit(0)
