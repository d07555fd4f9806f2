"""Measures the CPU time of this process and of all that it started, including daemons that left its process
tree.
"""

from __future__ import annotations

import os
import resource
import time
from dataclasses import dataclass
from pathlib import Path

TAG = "TEST_LEDGER"
"""The environment variable that started processes inherit. It identifies daemons, whose parent is init."""

_TICKS = os.sysconf("SC_CLK_TCK")
_PROC = Path("/proc")


@dataclass(frozen=True)
class _Process:
    started: int
    parent: int
    is_ours: bool
    own_s: float = 0.0
    children_s: float = 0.0
    """The CPU time of children that the process has waited for."""


class Ledger:
    """Sums CPU times from /proc. What a process spends between the last reading and its end counts once its
    parent has waited for it.
    """

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._label = f"{TAG}={self._pid}.{time.time_ns()}"
        os.environ[TAG] = self._label.partition("=")[2]
        self._processes: dict[int, _Process] = {}
        self._own_s = self._children_s = self._total_s = 0.0
        self.read()

    def read(self) -> float:
        """Return the CPU seconds spent so far."""
        own_s, children_s = _spent(resource.RUSAGE_SELF), _spent(resource.RUSAGE_CHILDREN)
        self._total_s += own_s - self._own_s
        waited_for = {self._pid: children_s - self._children_s}
        self._children_s = children_s
        before, self._processes = self._processes, {}
        for pid in self._pids():
            process = self._look(pid, before.get(pid))
            if process is None:
                continue
            self._processes[pid] = process
            if process.is_ours:
                old = before.get(pid)
                is_new = old is None or old.started != process.started
                self._total_s += process.own_s - (0.0 if is_new else old.own_s)
                waited_for[pid] = process.children_s - (0.0 if is_new else old.children_s)
        known = self._ended(before)
        self._total_s += sum(max(0.0, seconds - known.get(pid, 0.0)) for pid, seconds in waited_for.items())
        self._own_s = _spent(resource.RUSAGE_SELF)  # no test pays for this reading
        return self._total_s

    def _pids(self) -> list[int]:
        return [int(name) for name in os.listdir(_PROC) if name.isdigit() and int(name) != self._pid]

    def _look(self, pid: int, old: _Process | None) -> _Process | None:
        try:
            fields = (_PROC / str(pid) / "stat").read_bytes().rpartition(b")")[2].split()
        except OSError:
            return None  # it has just ended
        parent, started = int(fields[1]), int(fields[19])
        if old is not None and old.started == started:
            is_ours = old.is_ours
        else:
            is_ours = self._is_ours(pid, parent)
        own, children = (sum(map(int, fields[at : at + 2])) / _TICKS for at in (11, 13))
        return _Process(started, parent, is_ours, own, children)

    def _is_ours(self, pid: int, parent: int) -> bool:
        of_parent = self._processes.get(parent)
        if parent == self._pid or (of_parent is not None and of_parent.is_ours):
            return True
        try:
            return self._label.encode() in (_PROC / str(pid) / "environ").read_bytes()
        except OSError:
            return False

    def _ended(self, before: dict[int, _Process]) -> dict[int, float]:
        """Return the times already counted for ended processes, by the ancestor that has waited for them."""
        ended = {
            pid: old
            for pid, old in before.items()
            if old.is_ours and ((now := self._processes.get(pid)) is None or now.started != old.started)
        }
        counted: dict[int, float] = {}
        for old in ended.values():
            ancestor = old.parent
            while ancestor in ended:
                ancestor = ended[ancestor].parent
            counted[ancestor] = counted.get(ancestor, 0.0) + old.own_s + old.children_s
        return counted


def _spent(who: int) -> float:
    usage = resource.getrusage(who)
    return usage.ru_utime + usage.ru_stime
