"""Steps that drafters did not look at, kept for a while for those that may want to draft after all."""

from __future__ import annotations

from collections import deque

from torch import Tensor

from engine.step.scheduler import ScheduledStep
from engine.step.sequence import SequenceState
from speculation.drafter import Computed

MOST_STEPS, _MOST_ROWS = 80, 1024
"""The latest steps are kept, so many of them and with so many rows of hidden states at most."""


class UnreadSteps:
    """To keep one costs next to nothing, which to observe it does not."""

    def __init__(self) -> None:
        self._steps: deque[tuple[ScheduledStep, Tensor]] = deque()
        self._num_rows = 0

    def keep(self, step: ScheduledStep, hidden: Tensor) -> None:
        """`hidden` [rows, captured layers * hidden_size] are the step's hidden states."""
        self._steps.append((step, hidden))
        self._num_rows += len(hidden)
        while len(self._steps) > MOST_STEPS or self._num_rows > _MOST_ROWS:
            _, dropped = self._steps.popleft()
            self._num_rows -= len(dropped)

    def of(self, sequence: SequenceState) -> list[Computed]:
        """The steps' parts that concern the sequence, the oldest first."""
        found = []
        for step, hidden in self._steps:
            row = 0
            for other, outcome in zip(step.sequences, step.outcomes, strict=True):
                if other is sequence:
                    found.append(Computed.of(sequence, outcome, hidden, row))
                row += outcome.num_rows
        return found

    def clear(self) -> None:
        self._steps.clear()
        self._num_rows = 0
