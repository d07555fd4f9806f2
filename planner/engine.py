"""A worker's engine on a virtual clock: the real scheduler and block manager. Steps are not computed, but
take the time that the profile predicts.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import floor

from costs.steps import ChunkBound, work_of
from engine.kv.block_manager import BlockManager
from engine.kv.sequence_blocks import SequenceBlocks
from engine.step.scheduler import ScheduledStep, Scheduler
from engine.step.sequence import SequenceState
from planner.profile import Profile
from protocol.ids import BlockIdentity
from protocol.kv_events import Window
from protocol.requests import EngineRequest

OUTPUT_TOKEN = 2**32 - 1
"""The id of every generated token. No prompt contains it."""
_ANY = 2**31
"""More tokens than any sequence has."""


class Clock:
    """The simulated time, with a queue of events. Events of the same time happen in the order of planning."""

    def __init__(self) -> None:
        self.now = 0.0
        self._planned: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()

    def at(self, time: float, happen: Callable[[], None]) -> None:
        """Plan an event at `time`, or now if that has passed."""
        heapq.heappush(self._planned, (max(time, self.now), next(self._order), happen))

    def run(self) -> None:
        while self._planned:
            self.now, _, happen = heapq.heappop(self._planned)
            happen()


@dataclass(eq=False)
class _NoBytes:
    """A KV pool without bytes. The block manager only asks for its numbers of blocks."""

    block_size: int
    num_blocks: int
    state_blocks: int = 0
    state_unit: int = 0

    def copy_block(self, source: int, target: int) -> None:
        """Copy nothing."""

    def move_tokens(self, tables: Sequence[Sequence[int]], first: int, places: Sequence[int]) -> None:
        """Move nothing."""


def block_manager(profile: Profile) -> BlockManager:
    size, costs = profile.block_size, profile.costs
    windows = [Window(window, size) if window else None for window in costs.kv_windows]
    pool = _NoBytes(size, profile.num_blocks)
    manager = BlockManager(pool, windows=windows, most_rows=costs.chunk_tokens)
    manager.least_tokens = profile.least_tokens
    return manager


def longest_sequence(profile: Profile) -> int:
    """Return the tokens of the longest sequence that fits on a worker."""
    low, high, blocks = 0, _ANY, SequenceBlocks(block_manager(profile), b"")
    while high - low > 1:
        middle = (low + high) // 2
        fits = blocks.needs(0, middle, profile.costs.chunk_tokens) <= profile.num_blocks
        low, high = (middle, high) if fits else (low, middle)
    return low


class TimedEngine:
    """An engine that calls `on_scheduled(request)` when a request first runs, `on_computed(sequence)` after a
    step with a chunk of a prompt to hand over, `on_first_token(sequence)` and `on_finished(sequence)` for
    tokens, and `on_room()` when there may be more room for KV.
    """

    on_scheduled: Callable[[EngineRequest], None]
    on_computed: Callable[[SequenceState], None]
    on_first_token: Callable[[SequenceState], None]
    on_finished: Callable[[SequenceState], None]
    on_room: Callable[[], None]

    def __init__(self, profile: Profile, clock: Clock) -> None:
        costs = profile.costs
        self.blocks = block_manager(profile)
        self.log = self.blocks.watch()
        self.scheduler = Scheduler(
            self.blocks,
            model=profile.name,
            kv_format="",
            max_num_seqs=profile.max_num_seqs,
            max_num_batched_tokens=costs.chunk_tokens,
            bound=ChunkBound(lambda: costs, costs.itl_budget_s, profile.block_size),
        )
        self._profile, self._costs, self._clock = profile, costs, clock
        self._block_size = profile.block_size
        self._order = itertools.count()
        self._step: ScheduledStep | None = None
        self._rows: list[SequenceState] = []
        """The sequences that decode in the current step."""
        self._credit = 0.0
        """The fraction of a token per row that is carried over from earlier steps."""
        self.neighbours: Sequence[TimedEngine] = ()
        """Engines of the same host, which slow this one down while they work."""
        self._began = self._ends_at = 0.0
        self.decode_s = self.row_seconds = 0.0
        """Seconds during which something was decoded, and the same seconds times the rows."""

    @property
    def is_busy(self) -> bool:
        return self._step is not None

    @property
    def usage(self) -> float:
        """Return the share of the pool that requests hold."""
        return 1 - self.blocks.available / self.blocks.num_blocks

    def root(self, request: EngineRequest) -> BlockIdentity:
        return self.scheduler.root(request)

    def submit(self, request: EngineRequest, *, prefill_only: bool = False) -> None:
        self._add(SequenceState(request, next(self._order), prefill_only))

    def join(self, request: EngineRequest, blocks: SequenceBlocks) -> None:
        """Add a sequence whose prompt's KV is in `blocks`. It decodes as soon as a row is free."""
        sequence = SequenceState(request, next(self._order))
        sequence.sequence_blocks, sequence.num_computed = blocks, len(sequence.token_ids)
        blocks.publish(sequence.token_ids, sequence.num_computed)
        sequence.append(OUTPUT_TOKEN)
        sequence.first_token_time = self._clock.now
        self._add(sequence)

    def _add(self, sequence: SequenceState) -> None:
        self.scheduler.add_waiting(sequence)
        self._begin_if_idle()

    def release(self, sequence: SequenceState) -> None:
        """Free the blocks of a sequence that has ended or was handed over."""
        self.scheduler.remove(sequence)
        self.scheduler.free(sequence)
        self.on_room()
        self._begin_if_idle()

    def boundary(self) -> float:
        """Return the end of the current step, when messages are handled."""
        return self._ends_at if self.is_busy else self._clock.now

    def _begin_if_idle(self) -> None:
        if self._step is None:
            self._begin()

    def _begin(self) -> None:
        step = self.scheduler.schedule()
        self._step = None
        if step.sequences:
            self._step, self._began = step, self._clock.now
            self._rows = [row for row in step.sequences if row.output_token_ids and row.num_uncomputed == 1]
            self._ends_at = self._began + self._seconds(step)
            self._clock.at(self._ends_at, self._end)
        for request in step.first_time:
            self.on_scheduled(request)

    def _seconds(self, step: ScheduledStep) -> float:
        costs, work = self._costs, work_of(step.sequences, step.num_tokens)
        prompt_s = work.tokens * costs.token_s + work.pairs * costs.attention_s
        prompt_s += costs.chunk_s if work.tokens else 0.0
        decode_s = costs.decode_s(work.rows, work.context)
        slower, prompts_slower = self._profile.decode_beside, self._profile.prefill_beside
        return self._slower(slower) * decode_s + self._slower(prompts_slower) * prompt_s

    def _slower(self, beside: float) -> float:
        """Return the factor by which work takes longer while the neighbours work."""
        if not self.neighbours:
            return 1.0
        working = sum(other.is_busy for other in self.neighbours) / len(self.neighbours)
        return 1 + working * (beside - 1)

    def _grow(self) -> int:
        """Take the room for the rows' tokens. Return how many each row gets: one if there is no room for
        more.
        """
        new = max(floor(self._credit + self._costs.tokens_per_row + 1e-9), 1)
        has_room = new == 1 or all(
            row.held.grow(row.num_computed, row.num_computed + min(new, _left(row))) for row in self._rows
        )
        return new if has_room else 1

    def _end(self) -> None:
        step = self._step
        assert step is not None
        new, passed = self._grow(), self._clock.now - self._began
        self.decode_s += passed if self._rows else 0.0
        self.row_seconds += passed * len(self._rows)
        self._credit = max(self._credit + self._costs.tokens_per_row - new, 0.0)
        for sequence, count in zip(step.sequences, step.num_tokens, strict=True):
            self._commit(sequence, count, new)
        self._begin()

    def _commit(self, sequence: SequenceState, count: int, new: int) -> None:
        """Commit `count` computed tokens. If they complete the sequence's KV, commit what follows: `new`
        tokens if the sequence was decoding.
        """
        tokens, output, held = sequence.token_ids, sequence.output_token_ids, sequence.held
        left, gets = _left(sequence), 0
        if count == len(tokens) - sequence.num_computed:
            gets = min(new, left) if count == 1 and output else 1
            output += [OUTPUT_TOKEN] * gets
            tokens += [OUTPUT_TOKEN] * gets
            count += gets - 1
        sequence.num_computed += count
        if self.blocks.has_windows or sequence.num_computed // self._block_size > len(held.identities):
            held.commit(sequence.num_computed, [], tokens)
        if gets and sequence.first_token_time is None:
            sequence.first_token_time = self._clock.now
            self.on_first_token(sequence)
        if gets == left:
            self.scheduler.remove(sequence)
            self.scheduler.free(sequence)
            self.on_finished(sequence)
            self.on_room()
        elif sequence.prefill_only:
            if gets:
                self.scheduler.hold(sequence)
            self.on_computed(sequence)


def _left(sequence: SequenceState) -> int:
    return sequence.params.max_tokens - len(sequence.output_token_ids)
