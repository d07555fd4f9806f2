"""Settles the heap of a process that has imported and loaded what it needs."""

from __future__ import annotations

import contextlib
import ctypes
import gc


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
