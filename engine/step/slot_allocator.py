"""State slots for running sequences, and copies of recurrent states between slots and the pool's blocks.

Later prompts find the states that are kept: at the last possible position of a prompt, at the position where
another prompt diverges from it, and at the end of a sequence's run. States that a sequence has continued from
are evicted first, since the next prompt of a conversation continues from the latest state.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence

from engine.kv.block_manager import BlockManager
from engine.kv.pool import KVPool
from engine.kv.state_slots import StateSlots
from engine.kv.store_blocks import RecurrentState
from engine.step.sequence import SequenceState


class StateSlotAllocator:
    """Allocator of state slots, one for each sequence that may run at a time. A sequence that does not run
    has its state in blocks, or no state.
    """

    def __init__(self, state_slots: StateSlots, blocks: BlockManager, pool: KVPool) -> None:
        assert blocks.states is not None
        self._state_slots = state_slots
        self._blocks = blocks
        self._store = blocks.states
        self._memory = pool.state_memory
        self._num_hits = 0

    def admit(self, sequence: SequenceState) -> None:
        """Begin to run a sequence that has blocks for all tokens: load the state that it continues from,
        plan the positions where its state is kept, and take room for a state to be handed over.
        """
        state = _state(sequence)
        self._num_hits += bool(state.passed)
        self.begin(sequence)
        state.age()
        sequence.keep_at.clear()
        for position in (*state.junctions, self._last_point(len(sequence.token_ids), sequence)):
            self._keep_at(sequence, position)
        if sequence.prefill_only:
            state.add()

    def share(self, leader: SequenceState, follower: SequenceState, num_shared: int) -> int:
        """Return the last position in the shared tokens where the follower can continue from the leader's
        state, and plan to keep that state.
        """
        position = self._last_point(num_shared, follower)
        _state(leader).junctions.add(position)
        self._keep_at(leader, position)
        return position

    def _last_point(self, num_tokens: int, sequence: SequenceState) -> int:
        """Return the last position in `num_tokens` tokens where the sequence could continue from a state."""
        unit = self._store.unit
        return min(num_tokens, len(sequence.token_ids) - 1) // unit * unit

    def _keep_at(self, sequence: SequenceState, position: int) -> None:
        """Plan to keep the state at `position`, unless the sequence has passed it."""
        end = self._state_slots.layout.position(len(sequence.token_ids))
        is_handed_over = sequence.prefill_only and position == end
        wanted = self._blocks.enable_prefix_caching and position > sequence.num_computed
        if wanted and not is_handed_over and position not in sequence.keep_at:
            bisect.insort(sequence.keep_at, position)

    def chunk(self, sequence: SequenceState, count: int) -> int:
        """Return `count`, or less where a step would pass over a state that is to be kept."""
        grid, start = self._state_slots.layout.grid, sequence.num_computed
        for position in sequence.keep_at:
            if start < position <= start + count - grid:
                return position - start
        return count

    def begin(self, sequence: SequenceState) -> None:
        """Give the sequence a state slot, and load the state that it has in blocks, if any."""
        sequence.state_slot = self._state_slots.take()
        state, slot = _state(sequence), sequence.state_slot
        if state.blocks:
            point = self._state_slots.load(slot, self._memory, state.blocks, sequence.num_computed)
            sequence.held.publish_state(point, sequence.token_ids, state.blocks)
            state.drop()
            sequence.num_computed = point

    def totals(self) -> dict[str, float]:
        """Return counts of kept states, in Prometheus' naming. May be called from any thread."""
        store = self._store
        num_kept = len(store.entries)
        return {
            "kept_states": num_kept,
            "kept_state_bytes": num_kept * store.entry_blocks * self._memory.shape[1],
            "kept_state_hits_total": self._num_hits,
            "kept_states_saved_total": store.num_saved,
            "kept_states_evicted_total": store.num_evicted,
        }

    def room(self, sequence: SequenceState) -> int:
        """Return how many draft tokens of a decoding sequence have room."""
        return self._state_slots.layout.room(sequence.num_computed)

    def stepped(self, sequence: SequenceState, first_drafted: int, accepted: Sequence[int]) -> None:
        """Move the inputs of the `accepted` draft tokens, and keep the state if its position is planned."""
        self._state_slots.move(sequence.state_slot, first_drafted, accepted)
        position = self._state_slots.position(sequence.state_slot)
        if position in sequence.keep_at:
            sequence.keep_at.remove(position)
            self._keep(sequence, position)

    def end(self, sequence: SequenceState) -> None:
        """Give back the slot of a sequence that stops running. Save its state in the blocks for the hand-off
        or, without these, keep a copy.
        """
        blocks, position = _state(sequence).blocks, self._state_slots.position(sequence.state_slot)
        if blocks:
            self._state_slots.save(sequence.state_slot, self._memory, blocks)
            sequence.held.publish_state(position, sequence.token_ids, blocks)
        else:
            self._keep(sequence, position)
        self._state_slots.give_back(sequence.state_slot)

    def _keep(self, sequence: SequenceState, position: int) -> None:
        """Keep a copy of the state, if there is room and none is kept at `position`."""
        held, count = sequence.held, self._store.entry_blocks
        if not held.lacks_state(position) or count > self._blocks.available:
            return
        _state(sequence).age()
        blocks = self._blocks.take(count)
        self._state_slots.save(sequence.state_slot, self._memory, blocks)
        held.publish_state(position, sequence.token_ids, blocks)
        self._blocks.dereference(blocks)


def _state(sequence: SequenceState) -> RecurrentState:
    assert sequence.held.state is not None
    return sequence.held.state
