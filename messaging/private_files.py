"""Reads files that hold secrets. A file that other users can read or change is refused, by flag and file
name.
"""

from __future__ import annotations

import os
import stat

from protocol.errors import ConfigError

_OTHERS, _OTHERS_OF_ROOTS = 0o077, 0o037
"""Permission bits that a secret file must not have. A file of root may be readable by its group, as mounted
secrets are.
"""


def read_private(path: str, flag: str) -> bytes:
    """Return the file's bytes. Raises `ConfigError` if it cannot be read, or if others may read or write
    it.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        with open(descriptor, "rb") as file:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise ConfigError(f"{flag}: {path} is no file")
            _check_owner(path, flag, status)
            return file.read()
    except OSError as error:
        raise ConfigError(f"{flag}: cannot read {path}: {error.strerror}") from error


def _check_owner(path: str, flag: str, status: os.stat_result) -> None:
    if status.st_uid not in (os.geteuid(), 0):
        raise ConfigError(f"{flag}: {path} belongs to user {status.st_uid}: have the server's user own it")
    mode = stat.S_IMODE(status.st_mode)
    if mode & (_OTHERS if status.st_uid else _OTHERS_OF_ROOTS):
        raise ConfigError(f"{flag}: others can read or change {path} (mode {mode:o}): chmod 600 {path}")
