"""Cores that workers of one host lend each other while they have nothing to do.

Each worker has a share of the host's cores. One that waits for messages says so on a board in memory that
all share; those that work divide its share among themselves, anew at each of their steps. So a lender that
wakes shares its cores for one step of the borrower at most. Nothing waits for the board, and the system is
not called for it.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from typing import NamedTuple

MAX_WORKERS = 256
"""On one board. Further ones keep to their own share."""
_UNUSED, _IDLE, _BUSY = b"\0", b"\1", b"\2"


class CoreBoard:
    """One byte for each worker that a process forks. The workers inherit the memory."""

    def __init__(self) -> None:
        self._states = mmap.mmap(-1, MAX_WORKERS)

    def write(self, place: int, *, is_busy: bool) -> None:
        self._states[place : place + 1] = _BUSY if is_busy else _IDLE

    def count(self) -> tuple[int, int]:
        """How many workers there are, and how many of them are busy."""
        states = self._states[:]
        return MAX_WORKERS - states.count(_UNUSED), states.count(_BUSY)


class CorePlace(NamedTuple):
    board: CoreBoard
    number: int


class CorePlaces:
    """Who has which place on the board of the process that forks the workers.

    The place of one that has ended, in whatever way, counts as idle until another one takes it.
    """

    def __init__(self) -> None:
        self.board = CoreBoard()
        self._taken: dict[int, int] = {}

    def first_free(self) -> CorePlace | None:
        """For a worker that is about to be forked; None where there are too many."""
        index = next((i for i in range(MAX_WORKERS) if i not in self._taken.values()), None)
        return CorePlace(self.board, index) if index is not None else None

    def take(self, pid: int, place: CorePlace | None) -> None:
        if place is not None:
            self._taken[pid] = place.number

    def give_back(self, pid: int) -> None:
        index = self._taken.pop(pid, None)
        if index is not None:
            self.board.write(index, is_busy=False)


def host_cores() -> int:
    """Those that this process may use."""
    return len(os.sched_getaffinity(0))


class SharedCores:
    """A worker's part: it has a place, and `own` of the `cores` that all on the board share. For the thread
    that steps the engine.
    """

    def __init__(self, place: CorePlace, own: int, cores: int, set_threads: Callable[[int], None]) -> None:
        self._board, self._number = place
        self._set_threads = set_threads
        self._own = self._threads = own
        self._cores = cores
        self._is_busy = self._has_changed = False
        self._board.write(self._number, is_busy=False)

    def idle(self) -> None:
        """The worker is about to wait."""
        self._write(is_busy=False)

    def begin_step(self) -> bool:
        """Have the step use as many threads as there are cores for the worker now. Whether some are lent."""
        self._write(is_busy=True)
        threads = self._share()
        self._has_changed = threads != self._threads
        if self._has_changed:
            self._set_threads(threads)
            self._threads = threads
        return threads > self._own

    def were_kept(self) -> bool:
        """Whether the step that ends had as many cores as the one before, to its end."""
        return not self._has_changed and self._share() == self._threads

    def _share(self) -> int:
        _, busy = self._board.count()
        return max(self._cores // max(busy, 1), 1)

    def _write(self, *, is_busy: bool) -> None:
        if is_busy != self._is_busy:
            self._board.write(self._number, is_busy=is_busy)
            self._is_busy = is_busy
