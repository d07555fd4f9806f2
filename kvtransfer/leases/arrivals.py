"""How a lease's pieces came in, as their receiver sees it."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field

from kvtransfer.framing.messages import Piece
from kvtransfer.interface import Arrival


@dataclass(frozen=True)
class PieceArrival:
    """How a piece came: announced at a time (monotonic seconds), `nbytes` on the wire."""

    transport: str
    foreign_format: str
    nbytes: int
    announced: float


@dataclass
class ArrivalRecord:
    """How one lease's pieces came in, as their receiver sees it.

    The sender reports durations only, so the two clocks need not agree. The time that a message is in transit
    is not included.
    """

    transport: str = ""
    nbytes: int = 0
    wait_s: float = 0.0
    foreign_formats: set[str] = field(default_factory=set)
    _first_push: float = math.inf
    _final_push_s: float = 0.0

    def add(self, piece: Piece, arrival: PieceArrival) -> None:
        """A piece is in place."""
        self.transport = arrival.transport
        self.nbytes += arrival.nbytes
        self.wait_s += piece.waited_s
        if arrival.foreign_format:
            self.foreign_formats.add(arrival.foreign_format)
        self._first_push = min(self._first_push, arrival.announced - piece.waited_s - piece.pushed_s)
        if piece.final:
            self._final_push_s = piece.pushed_s

    def arrival(self) -> Arrival:
        """All pieces have come, the last just now."""
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
