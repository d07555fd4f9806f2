"""A wake-up ends the waits of other threads."""

from __future__ import annotations

import os
import select

import pytest

from messaging.wake import StoppedError, Wake


def is_readable(wake: Wake) -> bool:
    poll = select.poll()
    poll.register(wake, select.POLLIN)
    return bool(poll.poll(0))


def test_a_set_is_cleared() -> None:
    wake = Wake()
    assert not is_readable(wake)
    wake.set()
    wake.set()
    assert is_readable(wake)
    wake.clear()
    assert not is_readable(wake)
    wake.close()


def test_a_stop_is_never_cleared() -> None:
    wake = Wake()
    wake.stop()
    for _ in range(2):
        assert is_readable(wake)
        with pytest.raises(StoppedError):
            wake.clear()
    wake.close()


def test_a_stop_during_a_clear_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither this thread nor the other waiting threads miss the stop."""
    wake, read = Wake(), os.eventfd_read

    def stop_and_read(fd: int) -> int:
        if not wake.stopped:
            wake.stop()
        return read(fd)

    monkeypatch.setattr(os, "eventfd_read", stop_and_read)
    with pytest.raises(StoppedError):
        wake.clear()
    assert is_readable(wake)
    wake.close()


def test_a_closed_wake_up_leaves_reused_descriptors_alone() -> None:
    wake = Wake()
    wake.close()
    fd = os.eventfd(0, os.EFD_NONBLOCK)  # most likely with the same number
    wake.set()
    wake.close()
    with pytest.raises(BlockingIOError):
        os.eventfd_read(fd)
    os.close(fd)
