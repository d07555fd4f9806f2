"""Leaving nothing behind: descendant processes and temporary directories."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import shutil
import sys
import tempfile
from pathlib import Path

import psutil

log = logging.getLogger(__name__)

_PR_SET_CHILD_SUBREAPER = 36
_KILL_ROUNDS = 3
_DIRECTORY_PREFIX = "tandem-"


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parent ends, so that `end_descendants` finds them."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def end_descendants(grace_s: float) -> None:
    """Ask every descendant to end, kill those that are there after `grace_s`, and reap them all."""
    descendants = psutil.Process().children(recursive=True)
    for process in descendants:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.terminate()
    _, left = psutil.wait_procs(descendants, timeout=grace_s)
    for process in left:
        log.warning("process %d did not end in time and is killed", process.pid)
    kill_descendants()


def kill_descendants() -> None:
    """Kill and reap every descendant, also those that are stopped, and those that they start meanwhile."""
    for _ in range(_KILL_ROUNDS):
        descendants = psutil.Process().children(recursive=True)
        for process in descendants:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(descendants, timeout=1.0)
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG) != (0, 0):
            continue


def make_directory() -> Path:
    """A directory of this process, with a path short enough for the Unix sockets within.

    Directories of earlier processes that were killed are removed on the way.
    """
    base = "/tmp" if os.path.isdir("/tmp") else tempfile.gettempdir()
    for stale in Path(base).glob(f"{_DIRECTORY_PREFIX}*-*"):
        pid = stale.name.split("-")[1]
        with contextlib.suppress(OSError):
            if pid.isdigit() and not psutil.pid_exists(int(pid)) and stale.stat().st_uid == os.getuid():
                shutil.rmtree(stale)
    return Path(tempfile.mkdtemp(prefix=f"{_DIRECTORY_PREFIX}{os.getpid()}-", dir=base))


def remove_directory(path: Path) -> None:
    shutil.rmtree(path, ignore_errors=True)
