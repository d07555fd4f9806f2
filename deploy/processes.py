"""This host's processes: what they import, which are stuck, how they end, this one included."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import logging
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path
from types import FrameType
from typing import NoReturn

import psutil

from protocol.config import ServeConfig

STOPPED_S = 3.0
"""A process that has been stopped this long (by SIGSTOP, or by a debugger) is stuck."""

IDLE_S = 150.0
"""A process that should work but uses no CPU for this long is stuck. Compilers get two minutes."""

OTHER_FILES = 64
"""Most files that a client has open in addition to its connections to the server."""

_LONGEST_LOOK_S = 2.0
"""The most time counted between two calls of `look`: the watching process may have been stopped, too."""


def import_paths() -> dict[str, str]:
    """Return the environment of Python processes that import from where this one does.

    They would import from the working folder first, where files may be named like modules, and be others'.
    """
    return {"PYTHONSAFEPATH": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


class ProcessWatch:
    """A watch over a process, through repeated calls of `look`."""

    def __init__(self, pid: int) -> None:
        """Watch the process `pid`. Raises `psutil.NoSuchProcess`."""
        self._process = psutil.Process(pid)
        self._looked_at = time.monotonic()
        self._core_s = -1.0
        self._stopped_s = self._idle_s = 0.0
        self.state = ""
        """The process's state in a word: "running", "sleeping", "stopped", "disk-sleep", "zombie", "dead"."""

    @property
    def pid(self) -> int:
        return self._process.pid

    def look(self) -> None:
        """Read the process's state. Call it about once a second."""
        now = time.monotonic()
        passed_s, self._looked_at = min(now - self._looked_at, _LONGEST_LOOK_S), now
        try:
            with self._process.oneshot():
                self.state, core_s = str(self._process.status()), sum(self._process.cpu_times()[:4])
        except psutil.NoSuchProcess:
            self.state = psutil.STATUS_DEAD
            return
        self._stopped_s = self._stopped_s + passed_s if self.is_stopped else 0.0
        self._idle_s = self._idle_s + passed_s if core_s == self._core_s else 0.0
        self._core_s = core_s

    @property
    def has_ended(self) -> bool:
        return self.state in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)

    @property
    def is_stopped(self) -> bool:
        """Whether the process was stopped at the last look."""
        return self.state in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)

    @property
    def stopped(self) -> str:
        """Return a message if the process has been stopped for too long, else ""."""
        return f"process {self.pid} is stopped (SIGSTOP)" if self._stopped_s > STOPPED_S else ""

    @property
    def stuck(self) -> str:
        """Return why the process, which should be at work, makes no progress; "" if it may be working."""
        idle = f"process {self.pid} ({self.state}) has used no core for {self._idle_s:.0f} s"
        return self.stopped or (idle if self._idle_s > IDLE_S else "")

    def end(self, timeout_s: float) -> bool:
        """Kill the process. Returns False if it still exists after `timeout_s`, as on a dead disk."""
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


log = logging.getLogger(__name__)

_LIBC = ctypes.CDLL(None)
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_KILL_ROUNDS = 3
_DIRECTORY_PREFIX = "tandem-"
_LOCK = ".tandem-lock"


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parent ends, so that `end_descendants` finds them."""
    _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def end_with_parent() -> None:
    """Have the kernel send this process SIGTERM when its parent's thread ends, for use as a `preexec_fn`."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)


def end_descendants(grace_s: float) -> None:
    """Terminate every descendant, kill those that still run after `grace_s`, and reap them all."""
    descendants = psutil.Process().children(recursive=True)
    for process in descendants:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.terminate()
    _, left = psutil.wait_procs(descendants, timeout=grace_s)
    for process in left:
        log.warning("process %d did not end in time and is killed", process.pid)
    kill_descendants()


def kill_descendants() -> None:
    """Kill and reap every descendant, including stopped ones and those that start meanwhile."""
    for _ in range(_KILL_ROUNDS):
        descendants = psutil.Process().children(recursive=True)
        for process in descendants:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(descendants, timeout=1.0)
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG) != (0, 0):
            continue


class PrivateDirectory:
    """A directory of this process only, with a path short enough for Unix sockets in it.

    The owner holds a lock in it, which works across pid namespaces; the kernel frees it when the process
    ends. Directories with a dead owner are removed when the next directory is made.
    """

    def __init__(self) -> None:
        base = Path("/tmp" if os.path.isdir("/tmp") else tempfile.gettempdir())
        for stale in base.glob(f"{_DIRECTORY_PREFIX}*/{_LOCK}"):
            _remove_if_abandoned(stale)
        self.path = Path(tempfile.mkdtemp(prefix=f"{_DIRECTORY_PREFIX}{os.getpid()}-", dir=base))
        self._lock = os.open(self.path / _LOCK, os.O_CREAT | os.O_RDWR, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)


def _remove_if_abandoned(lock: Path) -> None:
    """Remove the directory of a `PrivateDirectory`'s lock if its owner is dead."""
    with contextlib.suppress(OSError):
        if lock.lstat().st_uid != os.getuid():
            return
        descriptor = os.open(lock, os.O_RDWR | os.O_NOFOLLOW)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(lock.parent)
        finally:
            os.close(descriptor)


class Patience:
    """The handler of signals while the router's own handlers are not installed.

    Before Ray's start, a signal ends the process at once, since an exception could get lost in a callback of
    the import system. During an orderly shutdown, a signal cuts it short.
    """

    def __init__(self, config: ServeConfig) -> None:
        self._config = config
        self.started = self.asked = False
        self.ending = False
        self.over = threading.Event()

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.ending:
            self.over.set()
        elif self.started:
            raise KeyboardInterrupt
        else:
            kill_descendants()
            leave_unready(self._config)


def leave_unready(config: ServeConfig) -> NoReturn:
    """End the process at once, without waiting for Ray's other threads."""
    complain(config, "stopped before the server was ready")
    os._exit(130)


def complain(config: ServeConfig, reason: str) -> None:
    """Report why the server ends, unless the terminal is gone."""
    if config.log_format == "json":
        log.error("%s", reason)
    else:
        with contextlib.suppress(OSError):
            print(f"tandem: {reason}", file=sys.stderr, flush=True)
