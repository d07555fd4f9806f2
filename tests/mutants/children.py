"""Runs functions in child processes, over a private copy of the tree."""

from __future__ import annotations

import ctypes
import os
import select
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

PR_SET_CHILD_SUBREAPER = 36
Say = Callable[[str], None]


def adopt_orphans() -> None:
    """Become the parent of processes that children leave, so that `end_children` finds them."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def in_child(work: Callable[[Say], None], limit_s: float) -> tuple[list[str], bool]:
    """Fork and call `work` with a function that sends a line. Return the lines and whether the child ended
    well.

    The limit applies to each line and to the time after the last one.
    """
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        _work(work, reading, writing)
    os.close(writing)
    text, ended = _read(child, reading, limit_s)
    os.close(reading)
    if not ended:
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    return text.decode(errors="replace").splitlines(), status == 0


def _work(work: Callable[[Say], None], reading: int, writing: int) -> None:
    status = 1
    try:
        os.close(reading)
        os.setsid()
        work(lambda line: _write(writing, f"{line}\n".encode()))
        status = 0
    finally:
        os._exit(status)


def _write(pipe: int, rest: bytes) -> None:
    while rest:
        rest = rest[os.write(pipe, rest) :]


def _read(child: int, pipe: int, limit_s: float) -> tuple[bytes, bool]:
    """Read until the child ends. The pipe's end comes too late, since other processes may hold it open."""
    end = os.pidfd_open(child)
    deadline = time.monotonic() + limit_s
    text = b""
    try:
        while (left_s := deadline - time.monotonic()) > 0:
            ready, _, _ = select.select([pipe, end], [], [], left_s)
            more = os.read(pipe, 1 << 16) if pipe in ready else b""
            text += more
            deadline = time.monotonic() + limit_s if more else deadline
            if end in ready and not more:
                return text, True
        return text, False
    finally:
        os.close(end)


def end_children() -> None:
    """Kill all children of this process and their orphans."""
    while found := psutil.Process().children():
        for child in found:
            with suppress(psutil.NoSuchProcess):
                child.kill()
        psutil.wait_procs(found)


_LEFT = shutil.ignore_patterns(".git", ".venv", ".mypy_cache", ".ruff_cache", ".pytest_cache", ".hypothesis")


@contextmanager
def private_copy(root: Path) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="mutants-", ignore_cleanup_errors=True) as folder:
        copy = Path(folder) / "tree"
        shutil.copytree(root, copy, symlinks=True, ignore=_LEFT)
        (copy / ".venv").symlink_to((root / ".venv").resolve())
        yield copy


def environment(copy: Path) -> dict[str, str]:
    """Return the environment for processes that import the copy. They run one thread, since a fork keeps only
    one.
    """
    return {**os.environ, "PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1"}


@contextmanager
def changed(file: Path, text: bytes, age: int) -> Iterator[None]:
    """Change a file for the block's time. Its own modification time makes Python compile it again."""
    before, times = file.read_bytes(), file.stat()
    file.write_bytes(text)
    os.utime(file, (age, age))
    try:
        yield
    finally:
        file.write_bytes(before)
        os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
