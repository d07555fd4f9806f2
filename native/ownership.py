"""Safe access to files that other users must not have made or changed, nor, if secret, read.

Each file that is trusted, or that holds secrets or requests, is opened or checked here: it must be a regular
file, owned by this user or root, with a mode that keeps others out. A file to read may be reached by a
symbolic link, as Kubernetes mounts secrets and certbot keeps certificates: the check is on the opened file. A
file to write may not.

`peer_of` names the process, and its user, at the other end of a connection on this host.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import grp
import os
import pwd
import socket
import stat
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_WRITE_BY_GROUP, _WRITE_BY_ALL = 0o020, 0o002
_OTHERS, _OTHERS_OF_ROOTS = 0o077, 0o037
"""Permission bits that a secret must not have. Root may let a group read its file, as for mounted secrets."""
CACHE_VARIABLE = "TANDEM_CACHE_DIR"
_LOCK_WAIT, _LOCK_POLL = 120.0, 0.05  # seconds


class OwnershipError(PermissionError):
    """A file that others may have made, changed or read; the message names it and says why."""


def check_own(path: Path) -> None:
    """Raise OwnershipError unless only this user (or root) can have written the file or folder."""
    _check_owner(path, path.stat())


def check_private(path: Path) -> None:
    """Raise OwnershipError unless `path` is a file, not a link, that only this user can read or write."""
    status = path.lstat()
    _check_file(path, status, _OTHERS)


def read_own(path: str | Path, *, private: bool = False) -> bytes:
    """Return the bytes of a file that only this user (or root) can have written; with `private`, also read.

    Raises OSError; OwnershipError if others could.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    with open(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        others = _OTHERS if status.st_uid else _OTHERS_OF_ROOTS
        _check_file(path, status, others if private else 0)
        return file.read()


def open_own(path: str | Path, flags: int, mode: int = 0o600, *, private: bool = True) -> int:
    """Open a file for writing; return its descriptor. A new file gets `mode`. Raises like `read_own`."""
    try:
        descriptor = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, mode)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OwnershipError(f"{path} is a symbolic link: name the file itself") from error
        raise
    try:
        _check_file(path, os.fstat(descriptor), _OTHERS if private else 0)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Let one process make something while others wait, for two minutes at most: the one that has the lock
    may be stopped. Without file locks each makes it, so what is made must take its place at once.
    """
    descriptor = open_own(path, os.O_RDWR | os.O_CREAT)
    deadline = time.monotonic() + _LOCK_WAIT
    try:
        while time.monotonic() < deadline and not takes_lock(descriptor):
            time.sleep(_LOCK_POLL)  # a wait without any CPU time would count as stuck
        yield
    finally:
        os.close(descriptor)


def takes_lock(descriptor: int) -> bool:
    """Return whether nobody else has the lock, which is this process's now if there are file locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True


def _check_file(path: str | Path, status: os.stat_result, refused: int) -> None:
    """Raise OwnershipError unless this is a regular file of ours without the permission bits `refused`."""
    if stat.S_ISLNK(status.st_mode):
        raise OwnershipError(f"{path} is a symbolic link: name the file itself")
    if not stat.S_ISREG(status.st_mode):
        raise OwnershipError(f"{path} is no file")
    _check_owner(path, status, refused)


def _check_owner(path: str | Path, status: os.stat_result, refused: int = 0) -> None:
    mode = stat.S_IMODE(status.st_mode)
    if status.st_uid not in (os.geteuid(), 0):
        raise OwnershipError(f"{path} belongs to user {status.st_uid}: have the server's user own it")
    if mode & refused:
        raise OwnershipError(f"others can read or change {path} (mode {mode:o}): chmod 600 {path}")
    if mode & _WRITE_BY_ALL or (mode & _WRITE_BY_GROUP and not _is_users_own_group(status.st_gid)):
        raise OwnershipError(f"{path} can be written by others (mode {mode:o})")


def _is_users_own_group(group_id: int) -> bool:
    """Return whether the group is this user's private group, as distributions make one for each user."""
    try:
        user, group = pwd.getpwuid(os.geteuid()), grp.getgrgid(group_id)
    except KeyError:
        return False
    is_own = group_id == user.pw_gid and group.gr_name == user.pw_name
    return is_own and not set(group.gr_mem) - {user.pw_name}


def cache_dir() -> Path:
    return Path(os.environ.get(CACHE_VARIABLE) or Path.home() / ".cache" / "tandem")


def own_folder(folder: Path) -> Path:
    """Return the folder; make it if missing. Raises OSError, also if others may write to it."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    check_own(folder)
    return folder


class Peer(NamedTuple):
    """The process at the other end of a connection. Each side sends secrets only to its own user."""

    pid: int
    user: int


def peer_of(connection: socket.socket) -> Peer:
    """Return the process that connected to, or listens at, a Unix socket."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return Peer(*struct.unpack("3i", credentials)[:2])
