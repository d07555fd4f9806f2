"""Stuck loops are distinguished from long steps."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from protocol.config import ServeConfig
from protocol.costs import StepCosts
from worker.heartbeat import BLOCKED_S, BUSY_S, LONGEST_STEPS, StallWatch, longest_step_s
from worker.parts import LoopProgress

TICK_S = 0.25


class Loop:
    """A loop whose state the test controls. `share` is the part of a core that it uses."""

    def __init__(self, longest_step_s: float = 0.1) -> None:
        self.progress = LoopProgress()
        self.share = 1.0
        self._used_s = 0.0
        self.progress.core_s = lambda: self._used_s
        self._longest_s = longest_step_s
        self.progress.begin()
        self.watch = StallWatch(self.progress)

    def after(self, seconds: float, turns_per_tick: int = 0) -> float:
        """Return the heartbeat's finding after this time."""
        found = 0.0
        for _ in range(round(seconds / TICK_S)):
            self._used_s += self.share * TICK_S
            self.progress.turns += turns_per_tick
            found = self.watch.look(TICK_S, self._longest_s)
        return found


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_a_loop_that_takes_turns_is_never_stuck(share: float) -> None:
    loop = Loop()
    loop.share = share
    assert loop.after(600, turns_per_tick=1) == 0


def test_a_waiting_loop_is_stuck_soon() -> None:
    loop = Loop()
    loop.after(1, turns_per_tick=1)
    loop.share = 0.0
    assert loop.after(BLOCKED_S) == 0
    assert loop.after(1) == pytest.approx(BLOCKED_S + 1)
    assert loop.after(TICK_S, turns_per_tick=1) == 0, "it goes on"
    assert loop.after(BLOCKED_S) == 0


def test_a_long_step_is_not_stuck() -> None:
    """It compiles, or shares its core. Reads and waits in between do not count."""
    loop = Loop()
    for share in (1.0, 0.05, 0.0) * 2:
        loop.share = share
        assert loop.after(BUSY_S / 6) == 0
    loop.share = 1.0
    assert loop.after(1) == pytest.approx(BUSY_S + 1), "but it does not end"


def test_a_huge_chunk_of_a_prompt_on_a_slow_cpu_is_not_stuck() -> None:
    loop = Loop(longest_step_s=40)
    assert loop.after(40 * LONGEST_STEPS) == 0
    assert loop.after(1) > 0


def test_between_two_loops_nothing_is_stuck() -> None:
    loop = Loop()
    loop.share = 0.0
    loop.progress.end()
    assert loop.after(600) == 0
    loop.progress.begin()
    assert loop.after(BLOCKED_S) == 0
    assert loop.after(1) > 0


def test_the_longest_step_is_a_full_batch_with_a_late_chunk() -> None:
    costs = StepCosts(
        step_s=0.5, row_s=0.25, context_s=0.001, chunk_s=1.0, token_s=0.01, attention_s=1e-5, chunk_tokens=200
    )
    config = ServeConfig(max_num_seqs=4, block_size=16)
    found = longest_step_s(costs, config, max_model_len=1000, total_blocks=100)
    decoding = 0.5 + 4 * 0.25 + 1600 * 0.001
    assert found == pytest.approx(decoding + 1.0 + 200 * (0.01 + 1e-5 * (1000 + 100)))


@contextmanager
def running(work: threading.Event | None) -> Iterator[LoopProgress]:
    """Run a real thread that waits, or computes while `work` is set."""
    progress, begun, over = LoopProgress(), threading.Event(), threading.Event()

    def run() -> None:
        progress.begin()
        begun.set()
        while work is not None and not over.is_set():
            sum(range(1000))
        over.wait()
        progress.end()

    thread = threading.Thread(target=run)
    thread.start()
    begun.wait()
    yield progress
    over.set()
    thread.join()


def test_a_waiting_thread_uses_no_core_and_a_computing_one_does() -> None:
    for work in (None, threading.Event()):
        with running(work) as progress:
            before, pause = progress.core_s(), threading.Event()
            for _ in range(200 if work is not None else 20):
                pause.wait(0.01)
                if progress.core_s() - before > 0.02:
                    break
            assert (progress.core_s() - before > 0.02) == (work is not None)
        assert progress.core_s() == 0
