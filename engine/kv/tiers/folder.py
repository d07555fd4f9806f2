"""Gives each process a folder of its own, although several processes are given the same path."""

from __future__ import annotations

import fcntl
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from native.ownership import check_own, open_own
from protocol.errors import ConfigError

MAX_WORKERS = 1024


@dataclass(frozen=True)
class ClaimedFolder:
    """Locked until `release` or the end of the process, even after a SIGKILL: the kernel drops the lock."""

    path: Path
    lock_fd: int

    def release(self) -> None:
        os.close(self.lock_fd)


def claim_folder(parent: Path) -> ClaimedFolder:
    """The first of `parent`/worker-0, worker-1, ... that no living process has claimed.

    A block is found by its identity alone, so it does not matter which worker used the folder before. Raises
    `ConfigError`, naming the flag.
    """
    try:
        for number in range(MAX_WORKERS):
            folder = parent / f"worker-{number}"
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            check_own(folder)
            lock_fd = _try_lock(folder / "lock")
            if lock_fd is not None:
                return ClaimedFolder(folder, lock_fd)
    except OSError as error:
        raise ConfigError(f"--kv-disk-path: cannot use {parent}: {error}") from error
    raise ConfigError(f"--kv-disk-path: {parent} is in use by {MAX_WORKERS} workers")


def _try_lock(path: Path) -> int | None:
    fd = open_own(path, os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        return None
    except OSError:
        os.close(fd)
        raise
    return fd


def check_free_space(folder: Path, wanted: int) -> None:
    """Raise `ConfigError` unless `wanted` bytes fit, including what our files already take."""
    present = sum(file.stat().st_blocks * 512 for file in folder.iterdir() if file.is_file())
    room = shutil.disk_usage(folder).free + present
    if wanted > room:
        raise ConfigError(
            f"--kv-disk-size: {wanted / 2**30:.3g} GiB are asked for, "
            f"{folder} has room for {room / 2**30:.3g} GiB"
        )
