"""A file descriptor that other threads set, so that a blocking poll returns."""

from __future__ import annotations

import os


class Wakeup:
    """Level-triggered: readable from `set()` until `clear()`. Any thread may set it, also after `close()`."""

    def __init__(self) -> None:
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._closed = False

    def fileno(self) -> int:
        return self._fd

    def set(self) -> None:
        if not self._closed:
            os.eventfd_write(self._fd, 1)

    def clear(self) -> None:
        try:
            os.eventfd_read(self._fd)
        except BlockingIOError:
            return

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            os.close(self._fd)
