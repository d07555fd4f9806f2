"""Builds of kernels beside processes that build, too."""

from __future__ import annotations

import fcntl
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from native import build, ownership


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(build, "cache_dir", lambda: tmp_path / "cache")
    source = tmp_path / "one.cpp"
    source.write_text('extern "C" int one() { return 1; }\n')
    return source


@contextmanager
def locked_elsewhere(path: Path) -> Iterator[None]:
    ownership.own_folder(path.parent)
    lock = ownership.open_own(path, os.O_RDWR | os.O_CREAT)
    fcntl.flock(lock, fcntl.LOCK_EX)
    yield
    os.close(lock)


def test_a_stopped_process_that_has_the_lock_stops_no_build(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ownership, "_LOCK_WAIT", 0.1)
    with locked_elsewhere(build.cache_dir() / "lock"):
        assert build.build(source).exists()


def test_a_wait_for_another_build_uses_some_cpu(source: Path) -> None:
    """A process without any CPU time for minutes would count as stuck."""
    waiting = threading.Thread(target=build.build, args=[source])
    with locked_elsewhere(build.cache_dir() / "lock"):
        waiting.start()
        clock = time.pthread_getcpuclockid(waiting.ident or 0)
        before = time.clock_gettime(clock)
        while time.clock_gettime(clock) < before + 0.001:
            assert waiting.is_alive()
            time.sleep(0.01)
    waiting.join()
    assert build.build(source).exists()
