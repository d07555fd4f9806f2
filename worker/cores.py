"""Loans of idle workers' cores to the busy workers of the same host.

Each worker has a share of the host's cores. A worker that waits for messages marks itself idle on a board in
shared memory. At each of their steps the busy workers divide all cores among themselves. So a worker that
wakes shares its cores for at most one step of another worker. The board takes no lock and no system call.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from native.control_groups import PROC, groups_of

MAX_WORKERS = 256
"""Most workers on one board. Further workers keep to their own share."""
_UNUSED, _IDLE, _BUSY = b"\0", b"\1", b"\2"


class CoreBoard:
    """A board with one byte for each worker that a process forks. The workers inherit its memory."""

    def __init__(self) -> None:
        self._states = mmap.mmap(-1, MAX_WORKERS)

    def write(self, place: int, *, is_busy: bool) -> None:
        self._states[place : place + 1] = _BUSY if is_busy else _IDLE

    def count(self) -> tuple[int, int]:
        """Return the number of workers and how many of them are busy."""
        states = self._states[:]
        return MAX_WORKERS - states.count(_UNUSED), states.count(_BUSY)


class CorePlace(NamedTuple):
    board: CoreBoard
    number: int


class CorePlaces:
    """The assignment of places on a board, in the process that forks the workers.

    The place of an ended worker counts as idle until another worker takes it, however the worker ended.
    """

    def __init__(self) -> None:
        self.board = CoreBoard()
        self._taken: dict[int, int] = {}

    def first_free(self) -> CorePlace | None:
        """Return a place for the next worker to fork, or None if the board is full."""
        index = next((i for i in range(MAX_WORKERS) if i not in self._taken.values()), None)
        return CorePlace(self.board, index) if index is not None else None

    def take(self, pid: int, place: CorePlace | None) -> None:
        if place is not None:
            self._taken[pid] = place.number

    def give_back(self, pid: int) -> None:
        index = self._taken.pop(pid, None)
        if index is not None:
            self.board.write(index, is_busy=False)


def host_cores(proc: Path = PROC) -> int:
    """Return the number of cores that the process whose files are in `proc` may use.

    A limit of its container may be a share of time on all cores: as many threads as that is worth are used,
    since Linux would stop more of them for a part of each period.
    """
    cores = len(os.sched_getaffinity(0))
    for version, folder in groups_of("cpu", proc):
        try:
            if version == 2:
                quota, period = (folder / "cpu.max").read_text().split()
            else:
                quota, period = ((folder / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
            share = int(quota) / int(period)
        except (OSError, ValueError):  # no limit: the file is missing in the root group, or says "max"
            continue
        cores = min(cores, max(1, int(share))) if share > 0 else cores
    return cores


class SharedCores:
    """A worker's view of the board, with its `own` share of all `cores`. For the engine's thread."""

    def __init__(self, place: CorePlace, own: int, cores: int, set_threads: Callable[[int], None]) -> None:
        self._board, self._number = place
        self._set_threads = set_threads
        self._own = self._threads = own
        self._cores = cores
        self._is_busy = self._has_changed = False
        self._board.write(self._number, is_busy=False)

    def idle(self) -> None:
        """Mark the worker idle, before it waits for messages."""
        self._write(is_busy=False)

    def begin_step(self) -> bool:
        """Set the number of threads to the cores available for this step. Return whether some are lent."""
        self._write(is_busy=True)
        threads = self._share()
        self._has_changed = threads != self._threads
        if self._has_changed:
            self._set_threads(threads)
            self._threads = threads
        return threads > self._own

    def were_kept(self) -> bool:
        """Return whether the ending step had its cores to the end, and the step before as many."""
        return not self._has_changed and self._share() == self._threads

    def _share(self) -> int:
        _, busy = self._board.count()
        return max(self._cores // max(busy, 1), 1)

    def _write(self, *, is_busy: bool) -> None:
        if is_busy != self._is_busy:
            self._board.write(self._number, is_busy=is_busy)
            self._is_busy = is_busy
