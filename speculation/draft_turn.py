"""A drafter's turn in a step, and how long it took: the host, or, where that does not wait, the device."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from protocol.speculation import Source
from speculation.control.request import SpeculatingRequest


class DraftTurn:
    """It begins now. `is_late` says of one that has ended that the device may still be at it; then nobody may
    ask for its time before the host has waited for something behind it.
    """

    def __init__(
        self,
        method: Source,
        requests: Sequence[SpeculatingRequest],
        rooms: Sequence[int],
        device: torch.device,
    ) -> None:
        self.method, self.requests, self.rooms = method, requests, rooms
        self.is_late = False
        self.began = self._ended = time.perf_counter()
        self._marks: list[torch.cuda.Event] = []
        if device.type != "cpu":
            self._marks = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            self._marks[0].record()

    def end(self, *, is_late: bool) -> None:
        self._ended = time.perf_counter()
        self.is_late = is_late and bool(self._marks)
        if self.is_late:
            self._marks[1].record()

    @property
    def seconds(self) -> float:
        """The device's are those between its first launch and the end of its last, launching included."""
        if self.is_late:
            return self._marks[0].elapsed_time(self._marks[1]) * 1e-3
        return self._ended - self.began
