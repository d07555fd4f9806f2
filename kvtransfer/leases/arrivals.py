"""Records when a lease's pieces arrived at the receiver."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field

from kvtransfer.framing.messages import Piece
from kvtransfer.interface import Arrival


@dataclass(frozen=True)
class PieceArrival:
    """The arrival of a piece: announced at a time (monotonic seconds), `nbytes` on the wire."""

    transport: str
    foreign_format: str
    nbytes: int
    announced: float


@dataclass
class ArrivalRecord:
    """The arrivals of one lease's pieces.

    The sender reports durations only, so the two clocks need not agree. Time in transit is not included.
    """

    transport: str = ""
    nbytes: int = 0
    wait_s: float = 0.0
    foreign_formats: set[str] = field(default_factory=set)
    _first_push: float = math.inf
    _final_push_s: float = 0.0

    def add(self, piece: Piece, arrival: PieceArrival) -> None:
        """Record that a piece is in place."""
        self.transport = arrival.transport
        self.nbytes += arrival.nbytes
        self.wait_s += piece.waited_s
        if arrival.foreign_format:
            self.foreign_formats.add(arrival.foreign_format)
        self._first_push = min(self._first_push, arrival.announced - piece.waited_s - piece.pushed_s)
        if piece.final:
            self._final_push_s = piece.pushed_s

    def arrival(self) -> Arrival:
        """Summarize the arrivals. Called when the last piece has just come."""
        now = time.monotonic()
        seconds = now - self._first_push
        return Arrival(
            at=now,
            transport=self.transport,
            nbytes=self.nbytes,
            seconds=seconds,
            exposed_s=max(0.0, seconds - self._final_push_s),
            wait_s=self.wait_s,
            foreign_formats=frozenset(self.foreign_formats),
        )
