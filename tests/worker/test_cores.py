"""The shared board by which workers lend each other cores."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from worker.cores import MAX_WORKERS, CoreBoard, CorePlace, CorePlaces, SharedCores, host_cores


class Workers:
    """Workers of one host with two own cores each. `threads` has the number that each one uses."""

    def __init__(self, count: int) -> None:
        board = CoreBoard()
        self.threads = [2] * count
        self.cores = [SharedCores(CorePlace(board, n), 2, 2 * count, self._setter(n)) for n in range(count)]

    def _setter(self, number: int):
        return lambda threads: self.threads.__setitem__(number, threads)

    def step(self, number: int) -> int:
        lent = self.cores[number].begin_step()
        assert lent == (self.threads[number] > 2)
        return self.threads[number]


def test_working_workers_share_the_cores_of_idle_ones() -> None:
    workers = Workers(3)
    assert workers.step(0) == 6
    assert workers.step(1) == 3
    assert workers.step(0) == 3, "it gives back at its next step"
    assert workers.step(2) == 2
    assert (workers.step(0), workers.step(1)) == (2, 2)
    workers.cores[1].idle()
    assert (workers.step(0), workers.step(2)) == (3, 3)
    workers.cores[2].idle()
    assert workers.step(0) == 6


def test_a_later_worker_with_a_smaller_share_gets_as_much_as_the_first() -> None:
    """This happens when a node takes over another one's worker: the first had all four cores as its own."""
    board, threads = CoreBoard(), [4, 2]
    first, second = (
        SharedCores(CorePlace(board, n), threads[n], 4, lambda t, n=n: threads.__setitem__(n, t))
        for n in (0, 1)
    )
    assert not first.begin_step() and threads == [4, 2]
    assert not second.begin_step() and not first.begin_step()
    assert threads == [2, 2]


def test_a_step_keeps_its_cores_to_its_end() -> None:
    workers = Workers(2)
    first, second = workers.cores
    assert workers.step(0) == 4 and not first.were_kept(), "the first on lent cores"
    assert workers.step(0) == 4 and first.were_kept()
    assert workers.step(0) == 4
    assert workers.step(1) == 2 and not first.were_kept(), "their owner took them in its midst"
    assert workers.step(0) == 2 and not first.were_kept()
    assert workers.step(0) == 2 and first.were_kept() and second.were_kept()


def test_threads_are_set_only_when_they_change() -> None:
    calls: list[int] = []
    board = CoreBoard()
    cores, other = (SharedCores(CorePlace(board, number), 1, 2, calls.append) for number in range(2))
    for _ in range(3):
        cores.begin_step()
    assert calls == [2]
    other.begin_step()
    for _ in range(3):
        cores.begin_step()
    assert calls == [2, 1]


def test_the_cores_of_a_worker_killed_during_a_step_are_lent() -> None:
    places = CorePlaces()
    mine, theirs = CorePlace(places.board, MAX_WORKERS - 1), places.first_free()
    assert theirs is not None
    threads: list[int] = []
    cores = SharedCores(mine, 1, 2, threads.append)
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        SharedCores(theirs, 1, 2, lambda threads: None).begin_step()
        os.write(writer, b"works")
        signal.pause()
    places.take(pid, theirs)
    assert os.read(reader, 5) == b"works"
    assert not cores.begin_step()
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    assert not cores.begin_step(), "nobody has noticed yet"
    places.give_back(pid)
    assert cores.begin_step() and threads == [2]
    assert places.first_free() == theirs
    os.close(reader)
    os.close(writer)


def test_workers_beyond_the_boards_room_do_without() -> None:
    places = CorePlaces()
    for pid in range(MAX_WORKERS):
        place = places.first_free()
        assert place is not None and place.number == pid
        places.take(pid, place)
    assert places.first_free() is None
    places.take(1000, None)
    places.give_back(1000)
    places.give_back(7)
    assert places.first_free() == CorePlace(places.board, 7)


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize(
    ("quota", "cores"), [("max", 8), ("300000", 3), ("250000", 2), ("50000", 1), ("900000", 8)]
)
def test_a_containers_share_of_time_limits_its_cores(
    version: int, quota: str, cores: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    files = {"cpu.max": f"{quota} 100000"}
    mount, path = f"31 23 0:27 / {tmp_path} rw - cgroup2 cgroup2 rw", "0::/pod/one"
    if version == 1:
        files = {"cpu.cfs_quota_us": quota.replace("max", "-1"), "cpu.cfs_period_us": "100000"}
        mount, path = f"31 23 0:27 / {tmp_path} rw - cgroup cgroup rw,cpu,cpuacct", "4:cpu,cpuacct:/pod/one"
    (tmp_path / "pod/one").mkdir(parents=True)
    for name, text in files.items():
        (tmp_path / "pod" / name).write_text(f"{text}\n")
    (tmp_path / "cgroup").write_text(f"{path}\n")
    (tmp_path / "mountinfo").write_text(f"{mount}\n")
    assert host_cores(tmp_path) == cores
