"""Detects a stuck loop, which would otherwise look alive because the heartbeat goes on.

Some turns take minutes, such as a chunk of a prompt on a large model and a slow CPU. A loop that computes
may therefore take a multiple of the longest step that its measured costs make likely. A loop that waits is
found sooner, because it uses no core time.
"""

from __future__ import annotations

import threading
import time

from protocol.config import ServeConfig
from protocol.costs import StepCosts

BLOCKED_S = 10.0
"""[s] The time without use of a core after which a loop is stuck. The loop waits 0.25 s for messages, no
longer than this for another rank, and never for disks and peers, which have threads of their own.
"""

BUSY_S = 60.0
"""[s] The time for any turn: it may compile code, or share its core with many processes."""

LONGEST_STEPS = 10.0
"""The multiple of the worker's longest step that a turn may also take. On cores shared by five busy
processes each, the slowest turns took twice the longest step (29 M parameters, float32).
"""

_IDLE_SHARE = 0.01
"""The share of a core below which the loop counts as waiting."""


class LoopProgress:
    """The loop's progress, which the loop's thread writes and the heartbeat's thread reads."""

    def __init__(self) -> None:
        self.turns = 0
        """The number of turns that have begun."""
        self.thread: int | None = None
        """The loop's thread, or None while no loop runs."""
        self._clock = 0

    def begin(self) -> None:
        """Note that the loop runs in the calling thread from now on."""
        self.turns += 1
        self.thread = threading.get_ident()
        self._clock = time.pthread_getcpuclockid(self.thread)

    def end(self) -> None:
        self.thread = None

    def core_s(self) -> float:
        """Return the core time that the loop's thread has used; 0 while no loop runs."""
        try:
            return time.clock_gettime(self._clock) if self.thread is not None else 0.0
        except OSError:  # the thread has ended just now
            return 0.0


class StallWatch:
    """Watches the loop's progress. Belongs to the heartbeat's thread."""

    def __init__(self, progress: LoopProgress) -> None:
        self._progress = progress
        self._turn = (progress.thread, progress.turns)
        self._core_s = 0.0
        self._stood_s = self._waited_s = 0.0

    def look(self, passed_s: float, longest_step_s: float) -> float:
        """Return how long the loop has been in the same turn if that is too long, else 0.

        `passed_s` is the time since the last look, without times when this process did not run.
        """
        progress = self._progress
        turn, core_s = (progress.thread, progress.turns), progress.core_s()
        if turn != self._turn or progress.thread is None:
            self._turn, self._stood_s, self._waited_s = turn, 0.0, 0.0
        else:
            self._stood_s += passed_s
            waits = core_s - self._core_s < _IDLE_SHARE * passed_s
            self._waited_s = self._waited_s + passed_s if waits else 0.0
        self._core_s = core_s
        is_stuck = self._waited_s > BLOCKED_S or self._stood_s > max(BUSY_S, LONGEST_STEPS * longest_step_s)
        return self._stood_s if is_stuck else 0.0


def longest_step_s(costs: StepCosts, config: ServeConfig, max_model_len: int, total_blocks: int) -> float:
    """Return the estimated time of the largest possible step: a full batch whose contexts fill the pool, and
    a chunk at the end of the longest prompt.
    """
    context = costs.room_tokens(total_blocks, config.block_size)
    prompt_s = costs.chunks_s(costs.chunk_tokens, max_model_len, costs.chunk_tokens)
    return costs.decode_s(config.max_num_seqs, context) + prompt_s
