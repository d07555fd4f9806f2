"""Settings of a process: its heap, once it has imported and loaded what it needs, and its open files."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import resource


def freeze_heap() -> None:
    """Exclude all current objects from garbage collection, which begins if it was off, and return free memory
    to the kernel.

    Otherwise each collection scans the libraries' objects, which takes milliseconds and copies their pages in
    every forked process.
    """
    gc.collect()
    gc.freeze()
    gc.enable()
    with contextlib.suppress(AttributeError):  # not glibc
        ctypes.CDLL(None).malloc_trim(0)


def raise_file_limit(wanted: int) -> int:
    """Let this process and its later children open so many files, sockets included, or as many as the hard
    limit allows. Return how many they may open, at most `wanted`.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return wanted
    allowed = wanted if hard == resource.RLIM_INFINITY else min(hard, wanted)
    resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    return allowed
