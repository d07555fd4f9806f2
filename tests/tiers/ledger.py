"""Measures the CPU time of this process and of all that it started, including daemons that left its process
tree.
"""

from __future__ import annotations

import os
import resource
import time
from pathlib import Path

TAG = "TEST_LEDGER"
"""The environment variable that started processes inherit. It identifies daemons, whose parent is init."""

_TICKS = os.sysconf("SC_CLK_TCK")
_PROC = Path("/proc")


class Ledger:
    """Sums the CPU times of running processes from /proc, with those of the children that they waited for.
    What a process spends between the last reading and its end counts only if its parent waits for it.
    """

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._label = f"{TAG}={self._pid}.{time.time_ns()}"
        os.environ[TAG] = self._label.partition("=")[2]
        self._ours: dict[int, tuple[bytes, bool]] = {}
        """Each known process's start, and whether it is ours."""
        self._left_out_s = self._lost_s = self._total_s = 0.0
        self.read()

    def read(self) -> float:
        """Return the CPU seconds spent so far."""
        usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        spent_s = sum(usage.ru_utime + usage.ru_stime for usage in usages) + self._others_s()
        total_s = spent_s - self._left_out_s + self._lost_s
        self._lost_s += max(0.0, self._total_s - total_s)  # a process ended, and nobody waited for it
        self._total_s = max(self._total_s, total_s)
        after = resource.getrusage(resource.RUSAGE_SELF)
        self._left_out_s += after.ru_utime + after.ru_stime - usages[0].ru_utime - usages[0].ru_stime
        return self._total_s

    def _others_s(self) -> float:
        """Return the time of all our other processes that run, and of the children that they waited for."""
        before, self._ours = self._ours, {}
        ticks = 0
        for name in os.listdir(_PROC):
            if not name.isdigit() or int(name) == self._pid:
                continue
            try:
                fields = (_PROC / name / "stat").read_bytes().rpartition(b")")[2].split()
            except OSError:
                continue  # it has just ended
            pid, parent, started = int(name), int(fields[1]), fields[19]
            known = before.get(pid)
            is_ours = known[1] if known and known[0] == started else self._is_ours(pid, parent)
            self._ours[pid] = started, is_ours
            ticks += sum(map(int, fields[11:15])) if is_ours else 0
        return ticks / _TICKS

    def _is_ours(self, pid: int, parent: int) -> bool:
        if parent == self._pid or self._ours.get(parent, (b"", False))[1]:
            return True
        try:
            return self._label.encode() in (_PROC / str(pid) / "environ").read_bytes()
        except OSError:
            return False
