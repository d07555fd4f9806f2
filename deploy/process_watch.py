"""Tells a stuck process of this host from a working one, by its state in Linux."""

from __future__ import annotations

import time

import psutil

STOPPED_S = 3.0
"""A process that has been stopped this long (by SIGSTOP, or by a debugger) is stuck."""

IDLE_S = 150.0
"""A process that should work but has used no core for this long is stuck. It may itself wait for a compiler,
which ends within two minutes (`native.build`).
"""

_LONGEST_LOOK_S = 2.0
"""The most time between two calls of `look` that counts: the watching process may have been stopped, too."""


class ProcessWatch:
    """Watches a process through repeated calls of `look`."""

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
        """Read the process's state. Call it about once a second. Does nothing once the process has ended."""
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
        """Return a message if the process has been stopped for too long, else ""."""
        return f"process {self.pid} is stopped (SIGSTOP)" if self._stopped_s > STOPPED_S else ""

    @property
    def stuck(self) -> str:
        """Return why the process, which should be at work, makes no progress, or "" if it may still."""
        idle = f"process {self.pid} ({self.state}) has used no core for {self._idle_s:.0f} s"
        return self.stopped or (idle if self._idle_s > IDLE_S else "")

    def end(self, timeout_s: float) -> bool:
        """Kill the process. Returns False if it still exists after `timeout_s`, as when it waits for a dead
        disk.
        """
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
