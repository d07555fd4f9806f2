"""Removes descendant processes and temporary directories at the end."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import logging
import os
import shutil
import tempfile
from pathlib import Path

import psutil

log = logging.getLogger(__name__)

_PR_SET_CHILD_SUBREAPER = 36
_KILL_ROUNDS = 3
_DIRECTORY_PREFIX = "tandem-"
_LOCK = ".tandem-lock"


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parent ends, so that `end_descendants` finds them."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


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
    """A directory for this process alone. Its path is short enough for Unix sockets within it.

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
    """Remove the lock's directory if its owner is dead. Only `PrivateDirectory` makes such locks, so a
    user's own files are safe.
    """
    with contextlib.suppress(OSError):
        if lock.lstat().st_uid != os.getuid():
            return
        descriptor = os.open(lock, os.O_RDWR | os.O_NOFOLLOW)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(lock.parent)
        finally:
            os.close(descriptor)
