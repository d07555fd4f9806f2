"""Which running sequence has which seat for the state of its recurrent layers, and how states move."""

from __future__ import annotations

from torch import Tensor

from engine.recurrent.seats import Seats
from engine.sequence import SequenceState


class Seating:
    """There is a seat for each sequence that may run at a time. Others have a state in blocks, or none."""

    def __init__(self, seats: Seats, arena: Tensor, state_blocks: int) -> None:
        """A state that moves takes `state_blocks` blocks of the arena."""
        self._seats = seats
        self._arena = arena
        self._state_blocks = state_blocks

    def blocks_for(self, sequence: SequenceState) -> int:
        """That its state will need when its prompt is done."""
        return self._state_blocks if sequence.prefill_only else 0

    def sit(self, sequence: SequenceState) -> None:
        """It runs from now on: from the last grid point, if its prompt is computed."""
        sequence.seat = self._seats.take()
        held = sequence.held
        if held.state and not sequence.prefill_only:
            self._seats.load(sequence.seat, self._arena, held.state)
            held.drop_state()
            sequence.num_computed = self._seats.layout.position(sequence.num_computed)

    def rise(self, sequence: SequenceState) -> None:
        """It does not run any more. What is to be handed over keeps its state in its blocks."""
        if sequence.held.state:
            self._seats.save(sequence.seat, self._arena, sequence.held.state)
        self._seats.give_back(sequence.seat)
