"""A file descriptor that other threads set, so that a blocking poll returns."""

from __future__ import annotations

import contextlib
import os


class StoppedError(Exception):
    """Whoever owns the `Wake` is closing."""


class Wake:
    """Readable from `set` until `clear`, for good after `stop`. Any thread may set it, also after `close`."""

    def __init__(self) -> None:
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.stopped = False

    def fileno(self) -> int:
        return self._fd

    def set(self) -> None:
        if self._fd >= 0:
            os.eventfd_write(self._fd, 1)

    def stop(self) -> None:
        self.stopped = True
        self.set()

    def clear(self) -> None:
        """Forget earlier `set`s; after `stop` raises StoppedError instead."""
        if self.stopped:
            raise StoppedError
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._fd)
        if self.stopped:  # meanwhile, and what tells others may have been read just now
            self.set()
            raise StoppedError

    def close(self) -> None:
        """Idempotent."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)
