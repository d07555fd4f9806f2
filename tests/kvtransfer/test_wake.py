"""Ending other threads' waits."""

from __future__ import annotations

import select
import socket

import pytest

from kvtransfer.framing.channel import StoppedError, Wake


class StopsFirst:
    """A wake's reading end, at which a stop comes in between `clear`'s look and its read."""

    def __init__(self, wake: Wake, reader: socket.socket) -> None:
        self._wake = wake
        self._reader = reader

    def recv(self, size: int) -> bytes:
        if not self._wake.stopped:
            self._wake.stop()
        return self._reader.recv(size)


def is_readable(wake: Wake) -> bool:
    return bool(select.select([wake], [], [], 0)[0])


def test_a_set_is_cleared() -> None:
    wake = Wake()
    assert not is_readable(wake)
    wake.set()
    wake.set()
    assert is_readable(wake)
    wake.clear()
    assert not is_readable(wake)
    wake.close()


def test_a_stop_stays() -> None:
    wake = Wake()
    wake.stop()
    for _ in range(2):
        assert is_readable(wake)
        with pytest.raises(StoppedError):
            wake.clear()
    wake.close()


def test_a_stop_during_a_clear_is_not_lost() -> None:
    """Not for this thread, and not for the others that wait for it."""
    wake = Wake()
    wake.set()
    reader = wake._reader
    wake._reader = StopsFirst(wake, reader)  # type: ignore[assignment]
    with pytest.raises(StoppedError):
        wake.clear()
    wake._reader = reader
    assert is_readable(wake)
    wake.close()
