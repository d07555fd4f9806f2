"""A file descriptor that other threads set to make a blocking poll return."""

from __future__ import annotations

import contextlib
import os


class StoppedError(Exception):
    """The owner of the `Wake` is closing."""


class Wake:
    """A wake-up, readable from `set` to `clear`, or for good after `stop`. For any thread, even if closed."""

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
        """Reset earlier `set`s. Raises StoppedError after `stop`."""
        if self.stopped:
            raise StoppedError
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._fd)
        if self.stopped:  # `stop` came meanwhile, and its byte may have been read just now
            self.set()
            raise StoppedError

    def close(self) -> None:
        """Close the descriptors. Idempotent."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)
