"""Gives running sequences their state slots, and moves recurrent states between slots and the pool's blocks.

A state is kept for later prompts at the last point of a prompt where that can be, where a prompt leaves
another one's blocks, and when its sequence stops running. States that a sequence has continued from are the
first to make room: the next prompt of a conversation continues from the latest one.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence

from engine.kv.block_manager import BlockManager
from engine.kv.pool import KVPool
from engine.kv.sequence_blocks import State
from engine.kv.state_slots import StateSlots
from engine.step.sequence import SequenceState


class StateSlotAllocator:
    """There is a state slot for each sequence that may run at a time. Others have a state in blocks, or
    none.
    """

    def __init__(self, state_slots: StateSlots, blocks: BlockManager, pool: KVPool) -> None:
        assert blocks.states is not None
        self._state_slots = state_slots
        self._blocks = blocks
        self._store = blocks.states
        self._memory = pool.memory
        self._num_hits = 0

    def admit(self, sequence: SequenceState) -> None:
        """The sequence has blocks for all of its tokens now: load the state that it continues from, take room
        for the one that it will hand over, and plan where its state is to be kept.
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
        """Return where the follower is to continue from the leader's state, among the tokens that they share,
        and plan to keep it.
        """
        position = self._last_point(num_shared, follower)
        _state(leader).junctions.add(position)
        self._keep_at(leader, position)
        return position

    def _last_point(self, num_tokens: int, sequence: SequenceState) -> int:
        """The last position among so many tokens where the sequence could continue from a state."""
        unit = self._store.unit
        return min(num_tokens, len(sequence.token_ids) - 1) // unit * unit

    def _keep_at(self, sequence: SequenceState, position: int) -> None:
        """Keep the state when the sequence comes there, if it has not yet."""
        end = self._state_slots.layout.position(len(sequence.token_ids))
        is_handed_over = sequence.prefill_only and position == end
        wanted = self._blocks.enable_prefix_caching and position > sequence.num_computed
        if wanted and not is_handed_over and position not in sequence.keep_at:
            bisect.insort(sequence.keep_at, position)

    def chunk(self, sequence: SequenceState, count: int) -> int:
        """At most `count` tokens, so that a step never passes over a state that is to be kept."""
        grid, start = self._state_slots.layout.grid, sequence.num_computed
        for position in sequence.keep_at:
            if start < position <= start + count - grid:
                return position - start
        return count

    def begin(self, sequence: SequenceState) -> None:
        """The sequence runs from now on, from the state that it has in blocks, if any."""
        sequence.state_slot = self._state_slots.take()
        state, slot = _state(sequence), sequence.state_slot
        if state.blocks:
            point = self._state_slots.load(slot, self._memory, state.blocks, sequence.num_computed)
            sequence.held.publish_state(point, sequence.token_ids, state.blocks)
            state.drop()
            sequence.num_computed = point

    def totals(self) -> dict[str, float]:
        """Counts of kept states, in Prometheus' naming; for any thread."""
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
        """Room for drafted tokens of a decoding sequence."""
        return self._state_slots.layout.room(sequence.num_computed)

    def stepped(self, sequence: SequenceState, first_drafted: int, accepted: Sequence[int]) -> None:
        """The `accepted` tokens of the draft follow; keep the state if it is one of those to be kept."""
        self._state_slots.move(sequence.state_slot, first_drafted, accepted)
        position = self._state_slots.position(sequence.state_slot)
        if position in sequence.keep_at:
            sequence.keep_at.remove(position)
            self._keep(sequence, position)

    def end(self, sequence: SequenceState) -> None:
        """The sequence does not run any more. A state to be handed over goes into its blocks."""
        blocks, position = _state(sequence).blocks, self._state_slots.position(sequence.state_slot)
        if blocks:
            self._state_slots.save(sequence.state_slot, self._memory, blocks)
            sequence.held.publish_state(position, sequence.token_ids, blocks)
        else:
            self._keep(sequence, position)
        self._state_slots.give_back(sequence.state_slot)

    def _keep(self, sequence: SequenceState, position: int) -> None:
        """Keep a copy of the state, where there is room."""
        held, count = sequence.held, self._store.entry_blocks
        if not held.lacks_state(position) or count > self._blocks.available:
            return
        _state(sequence).age()
        blocks = self._blocks.take(count)
        self._state_slots.save(sequence.state_slot, self._memory, blocks)
        held.publish_state(position, sequence.token_ids, blocks)
        self._blocks.dereference(blocks)


def _state(sequence: SequenceState) -> State:
    assert sequence.held.state is not None
    return sequence.held.state
