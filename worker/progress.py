"""Whether the worker's loop gets on: one that is stuck must not pass for alive because the heartbeat goes on.

Turns of some workers take minutes: a chunk of a prompt, on a large model and a slow CPU. So a loop that
computes may take a multiple of the longest step that its measured costs make likely. A loop that waits for
something is found sooner, by the core time that it does not use.
"""

from __future__ import annotations

import threading
import time

from protocol.config import ServeConfig
from protocol.costs import StepCosts

BLOCKED_S = 10.0
"""A loop that has used no core for so long is stuck. It waits for messages for 0.25 s, for another rank no
longer than this, and for disks and peers not at all: these have threads of their own.
"""

BUSY_S = 60.0
"""A loop that computes may take so long for any turn: it may compile what runs for the first time, or share
its core with many processes.
"""

LONGEST_STEPS = 10.0
"""A turn may also take so many times the worker's longest step. On cores that five busy processes share each,
the slowest turns took twice as long as that (29 M parameters, float32).
"""

_IDLE_SHARE = 0.01
"""Whoever uses less of a core waits for something."""


class LoopProgress:
    """What the loop leaves behind for the heartbeat. The loop's thread writes, and the heartbeat's reads."""

    def __init__(self) -> None:
        self.turns = 0
        """A turn begins with the next number."""
        self.thread: int | None = None
        """The loop's; None while no loop runs."""
        self._clock = 0

    def begin(self) -> None:
        """The loop runs in the calling thread from now on."""
        self.turns += 1
        self.thread = threading.get_ident()
        self._clock = time.pthread_getcpuclockid(self.thread)

    def end(self) -> None:
        self.thread = None

    def core_s(self) -> float:
        """The time on a core that the loop's thread has used; 0 while no loop runs."""
        try:
            return time.clock_gettime(self._clock) if self.thread is not None else 0.0
        except OSError:  # it has ended just now
            return 0.0


class StallWatch:
    """Looks at the loop again and again. Belongs to the heartbeat's thread."""

    def __init__(self, progress: LoopProgress) -> None:
        self._progress = progress
        self._turn = (progress.thread, progress.turns)
        self._core_s = 0.0
        self._stood_s = self._waited_s = 0.0

    def look(self, passed_s: float, longest_step_s: float) -> float:
        """For how long the loop has been in the same turn if that is too long, else 0.

        `passed_s` is the time since the last look in which this process was running.
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
    """What a step takes by these costs that computes as much as any can: a whole batch whose contexts fill
    the pool, and a chunk at the end of the longest prompt.
    """
    context = costs.room_tokens(total_blocks, config.block_size)
    prompt_s = costs.chunks_s(costs.chunk_tokens, max_model_len, costs.chunk_tokens)
    return costs.decode_s(config.max_num_seqs, context) + prompt_s
