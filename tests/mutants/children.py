"""Runs work in a forked process with a time limit, and ends all processes that it leaves."""

from __future__ import annotations

import ctypes
import os
import select
import signal
import time
from collections.abc import Callable
from contextlib import suppress

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
