"""Tells a process of this host that is stuck from one that works, by what Linux says of it."""

from __future__ import annotations

import time

import psutil

STOPPED_S = 3.0
"""A process that has been stopped for so long (by SIGSTOP, or by a debugger) is stuck."""

IDLE_S = 150.0
"""A process that is waited for, and that has used no core for so long, is stuck. It may itself wait for a
compiler, which ends within two minutes (`native.build`).
"""

_LONGEST_LOOK_S = 2.0
"""The most time between two looks that counts: the watching process may have been stopped, too."""


class ProcessWatch:
    """Looks at a process again and again."""

    def __init__(self, pid: int) -> None:
        """Raises `psutil.NoSuchProcess`."""
        self._process = psutil.Process(pid)
        self._looked_at = time.monotonic()
        self._core_s = -1.0
        self._stopped_s = self._idle_s = 0.0
        self.state = ""
        """The process's state in a word: "running", "sleeping", "stopped", "disk-sleep"."""

    @property
    def pid(self) -> int:
        return self._process.pid

    def look(self) -> None:
        """To be called about once a second. Nothing changes once the process has ended."""
        now = time.monotonic()
        passed_s, self._looked_at = min(now - self._looked_at, _LONGEST_LOOK_S), now
        try:
            with self._process.oneshot():
                self.state, core_s = str(self._process.status()), sum(self._process.cpu_times()[:4])
        except psutil.NoSuchProcess:
            return
        is_stopped = self.state in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
        self._stopped_s = self._stopped_s + passed_s if is_stopped else 0.0
        self._idle_s = self._idle_s + passed_s if core_s == self._core_s else 0.0
        self._core_s = core_s

    @property
    def stopped(self) -> str:
        """Says that the process is stopped, if it has been for too long."""
        return f"process {self.pid} is stopped (SIGSTOP)" if self._stopped_s > STOPPED_S else ""

    @property
    def stuck(self) -> str:
        """Says why the process, which should be at work, gets nowhere; "": it may yet."""
        idle = f"process {self.pid} ({self.state}) has used no core for {self._idle_s:.0f} s"
        return self.stopped or (idle if self._idle_s > IDLE_S else "")

    def end(self, timeout_s: float) -> bool:
        """Kill it. False if it has not ended by then: it waits for a disk that does not answer."""
        deadline = time.monotonic() + timeout_s
        try:
            self._process.kill()
            while self._process.status() != psutil.STATUS_ZOMBIE:
                if time.monotonic() > deadline:
                    return False
                time.sleep(0.02)
        except psutil.NoSuchProcess:
            pass
        return True
