"""Which running sequence has which state slot for the state of its recurrent layers, and how states move.

A state is kept for later prompts at the last point of a prompt where that can be, where a prompt leaves
another one's blocks, and when its sequence stops to run. Those that a sequence has gone on from are the first
to make room: the next prompt of a conversation goes on from the latest one.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence

from engine.kv.block_manager import BlockManager
from engine.kv.state_slots import StateSlots
from engine.step.sequence import SequenceState


class StateSlotAllocator:
    """There is a state slot for each sequence that may run at a time. Others have a state in blocks, or
    none.
    """

    def __init__(self, state_slots: StateSlots, blocks: BlockManager) -> None:
        self._state_slots = state_slots
        self._blocks = blocks
        self._block_pool = blocks.block_pools[0]
        self._memory = blocks.pool.block_pools[0]
        self._num_hits = 0

    def blocks_for(self, sequence: SequenceState) -> int:
        """That its state will need when its prompt is done."""
        return self._block_pool.state_blocks if sequence.prefill_only else 0

    def admit(self, sequence: SequenceState) -> None:
        """It has blocks for all of its tokens now: plan where its state is to be kept."""
        self._num_hits += bool(sequence.held.passed)
        sequence.held.age_states()
        sequence.keep_at.clear()
        for position in (*sequence.held.junctions, self._last_point(len(sequence.token_ids), sequence)):
            self._keep_at(sequence, position)

    def meet(self, leader: SequenceState, follower: SequenceState, num_shared: int) -> int:
        """Where the follower is to go on from the leader's state, of so many tokens that they share."""
        position = self._last_point(num_shared, follower)
        leader.held.junctions.add(position)
        self._keep_at(leader, position)
        return position

    def _last_point(self, num_tokens: int, sequence: SequenceState) -> int:
        """Among so many tokens, where the sequence could go on from a state."""
        unit = self._blocks.state_unit
        return min(num_tokens, len(sequence.token_ids) - 1) // unit * unit

    def _keep_at(self, sequence: SequenceState, position: int) -> None:
        """Its state is to be kept when it comes there, if it has not yet."""
        is_handed_over = sequence.prefill_only and position == self._point(len(sequence.token_ids))
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

    def sit(self, sequence: SequenceState) -> None:
        """It runs from now on: from the state that it has in blocks, if any."""
        sequence.state_slot = self._state_slots.take()
        held = sequence.held
        if held.state:
            point = self._state_slots.load(
                sequence.state_slot, self._memory, held.state, sequence.num_computed
            )
            held.publish_state(point, sequence.token_ids, held.state)
            held.drop_state()
            sequence.num_computed = point

    def totals(self) -> dict[str, float]:
        """Of kept states, in Prometheus' naming; for any thread."""
        block_pool = self._block_pool
        block_bytes = self._memory.shape[1]
        return {
            "kept_states": block_pool.num_states,
            "kept_state_bytes": block_pool.num_states * block_pool.state_blocks * block_bytes,
            "kept_state_hits_total": self._num_hits,
            "kept_states_saved_total": block_pool.num_states_saved,
            "kept_states_evicted_total": block_pool.num_states_evicted,
        }

    def room(self, sequence: SequenceState) -> int:
        """For drafted tokens of a decoding one."""
        return self._state_slots.layout.room(sequence.num_computed)

    def stepped(self, sequence: SequenceState, first_drafted: int, accepted: Sequence[int]) -> None:
        """The `accepted` tokens of its draft follow; keep its state if that is one of those to be kept."""
        self._state_slots.move(sequence.state_slot, first_drafted, accepted)
        position = self._state_slots.position(sequence.state_slot)
        if position in sequence.keep_at:
            sequence.keep_at.remove(position)
            self._keep(sequence, position)

    def rise(self, sequence: SequenceState) -> None:
        """It does not run any more. What is to be handed over keeps its state in its blocks."""
        held, position = sequence.held, self._state_slots.position(sequence.state_slot)
        if held.state:
            self._state_slots.save(sequence.state_slot, self._memory, held.state)
            held.publish_state(position, sequence.token_ids, held.state)
        else:
            self._keep(sequence, position)
        self._state_slots.give_back(sequence.state_slot)

    def _point(self, num_tokens: int) -> int:
        return self._state_slots.layout.position(num_tokens)

    def _keep(self, sequence: SequenceState, position: int) -> None:
        """A copy of its state, where there is room."""
        held, count = sequence.held, self._block_pool.state_blocks
        if held.has_state(position) or not held.can_keep(position) or count > self._block_pool.num_available:
            return
        held.age_states()
        blocks = self._block_pool.take(count)
        self._state_slots.save(sequence.state_slot, self._memory, blocks)
        held.publish_state(position, sequence.token_ids, blocks)
        for block in blocks:
            self._block_pool.dereference(block)
