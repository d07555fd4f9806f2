"""Work on helper threads, called from Python: which threads take part, and for which the caller waits."""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Callable

import pytest

from native.threads import parallel

WAIT_S = 10.0

Function = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


def run(work: Callable[[int], None], threads: int, argument: int = 1) -> None:
    """Run work(argument) on up to `threads` threads."""
    call = ctypes.CFUNCTYPE(None, Function, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)(parallel())
    call(Function(lambda given: work(given or 0)), argument, threads, 0)


def meets(threads: int) -> bool:
    """Tell whether this number of threads take part at the same time."""
    barrier, met = threading.Barrier(threads), []

    def work(_: int) -> None:
        barrier.wait(WAIT_S)
        met.append(threading.get_ident())

    run(work, threads)
    return len(set(met)) == threads


@pytest.mark.parametrize("threads", [1, 2, 5, 3])
def test_as_many_threads_as_asked_for_work_at_the_same_time(threads: int) -> None:
    assert meets(threads)


def test_no_more_threads_than_asked_for_work() -> None:
    assert meets(4)
    calls: list[int] = []

    def work(_: int) -> None:
        calls.append(threading.get_ident())
        time.sleep(0.02)  # so that any further helper would arrive too

    run(work, 2)
    assert 1 <= len(calls) <= 2


def test_a_late_helper_does_no_work() -> None:
    """Helpers fall asleep between these jobs, and each job ends before they wake up."""
    ended: set[int] = set()
    late: list[int] = []

    def work(job: int) -> None:
        if job in ended:
            late.append(job)

    for job in range(1, 200):
        run(work, 3, job)
        ended.add(job)
        time.sleep(0.0004)
    assert not late


def test_the_caller_works_alone_while_another_caller_has_the_helpers() -> None:
    began, may_end = threading.Event(), threading.Event()

    def long_work(_: int) -> None:
        began.set()
        may_end.wait(WAIT_S)

    other = threading.Thread(target=run, args=(long_work, 2))
    other.start()
    assert began.wait(WAIT_S)
    calls: list[int] = []
    run(lambda _: calls.append(threading.get_ident()), 2)
    assert calls == [threading.get_ident()]
    may_end.set()
    other.join(WAIT_S)
    assert not other.is_alive()


def test_the_caller_waits_for_a_helper_that_has_begun() -> None:
    helper_began, done = threading.Event(), []
    caller = threading.get_ident()

    def work(_: int) -> None:
        if threading.get_ident() == caller:
            assert helper_began.wait(WAIT_S)
            return
        helper_began.set()
        time.sleep(0.05)  # longer than the caller spins
        done.append(True)

    run(work, 2)
    assert done


def test_a_forked_process_starts_its_own_helpers() -> None:
    assert meets(2)
    child = os.fork()
    if child == 0:
        try:
            os._exit(0 if meets(2) else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
