"""A simulated worker's engine: the batches that `engine/step/scheduler.py` would form, in simulated time.

Steps that only decode are not simulated one by one: while no request comes or ends, the time of many steps
has a closed form.
"""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil, sqrt

from engine.step.chunk_bound import ChunkBound
from planner.events import Events
from planner.kv_room import Holding, KvRoom
from planner.profile import Profile
from planner.request import SimulatedRequest


@dataclass(slots=True, eq=False)
class SimulatedSequence:
    """A request's work on one worker.

    `computed` of its `num_tokens` tokens are done; then it generates `left` more, or only the first of them
    if it `hands_over`. `order` is its place in the queue.
    """

    request: SimulatedRequest
    order: int
    num_tokens: int
    left: float
    hands_over: bool = False
    computed: int = 0
    holding: Holding | None = None
    was_admitted: bool = False
    has_answered: bool = False
    began_at: int = 0
    """The engine's number of steps when it began to decode."""
    growth: float = 1.0
    """KV room that each of its tokens takes from then on."""

    @property
    def blocks(self) -> Sequence[int]:
        """Return the full blocks of its prompt."""
        return self.request.blocks

    @property
    def uncomputed(self) -> int:
        return self.num_tokens - self.computed

    @property
    def held(self) -> Holding:
        assert self.holding is not None
        return self.holding


class DecodeRun:
    """`count` steps that decode the same rows: each takes `growth` seconds longer than the one before."""

    def __init__(self, started: float, first_s: float, growth_s: float, count: int) -> None:
        self.started, self.count = started, count
        self._first_s, self._growth_s = first_s, growth_s

    def after(self, steps: int) -> float:
        """Return the time at which `steps` of them are over."""
        return self.started + steps * self._first_s + self._growth_s * steps * (steps - 1) / 2

    def steps_until(self, now: float) -> int:
        """Return the number of steps up to the end of the one that runs at `now`."""
        passed, steps = now - self.started, float(self.count)
        if self._growth_s > 0:
            linear = self._first_s - self._growth_s / 2
            steps = (sqrt(linear * linear + 2 * self._growth_s * passed) - linear) / self._growth_s
        elif self._first_s > 0:
            steps = passed / self._first_s
        return min(max(ceil(steps - 1e-9), 1), self.count)


class SimulatedEngine:
    """Calls `on_scheduled(s)` when a sequence first runs, `on_computed(s)` after a step that computed a part
    of its prompt, `on_first_token(s)` and `on_finished(s)` for its tokens, and `on_room()` when there may be
    more room for KV.
    """

    on_scheduled: Callable[[SimulatedSequence], None]
    on_computed: Callable[[SimulatedSequence], None]
    on_first_token: Callable[[SimulatedSequence], None]
    on_finished: Callable[[SimulatedSequence], None]
    on_room: Callable[[], None]

    def __init__(self, profile: Profile, room: KvRoom, events: Events) -> None:
        self.room = room
        self.num_preemptions = 0
        self._profile, self._costs = profile, profile.costs
        self._events = events
        self._bound = ChunkBound(
            lambda: profile.costs, profile.costs.itl_budget_s, least_tokens=profile.block_size
        )
        self._waiting: list[SimulatedSequence] = []
        self._prefilling: list[SimulatedSequence] = []
        self._rows: list[tuple[int, int, SimulatedSequence]] = []
        """A heap of rows: (number of steps at its end, order, sequence)."""
        self._joining: list[SimulatedSequence] = []
        """Sequences that wait for a free row, in order."""
        self._context = 0.0
        """Tokens that the rows attend to."""
        self._row_growth = 0.0
        """KV room that a token of each row takes, summed."""
        self._steps = 0
        self._step: list[tuple[SimulatedSequence, int]] | None = None
        """The parts of prompts that the current step computes; None between steps."""
        self._run: DecodeRun | None = None
        self._version = 0
        """The version of the planned end of the current step or run."""
        self._computing: dict[int, SimulatedSequence] = {}
        """Prompt blocks that are being computed."""
        self.neighbours: Sequence[SimulatedEngine] = ()
        """Engines of the same host, which slow this one while they work."""
        self._began = self._ends = 0.0
        """The beginning and end of the current step or run."""
        self.decode_s = self.row_seconds = 0.0
        """Seconds in which something was decoded; the same, times the rows."""

    # --- what comes and goes --------------------------------------------------------------------------

    def submit(self, sequence: SimulatedSequence) -> None:
        bisect.insort(self._waiting, sequence, key=lambda waiting: waiting.order)
        self._wake()

    def join(self, sequence: SimulatedSequence) -> None:
        """Let a sequence whose prompt is in its blocks decode once there is a row for it."""
        self._joining.append(sequence)
        self._wake()

    def free(self, sequence: SimulatedSequence) -> None:
        """Free the room of a sequence that was handed over."""
        self.room.free(sequence.held)
        self.on_room()
        self._wake()

    def boundary(self) -> float:
        """Return the end of the current step, when messages are handled."""
        now = self._events.now
        if self._step is None:
            return now
        return self._run.after(self._run.steps_until(now)) if self._run is not None else self._ends

    @property
    def is_busy(self) -> bool:
        return self._step is not None

    def interrupt(self) -> None:
        """End a run with its current step, and release the room for the steps after it."""
        run = self._run
        if run is None:
            return
        steps = run.steps_until(self._events.now)
        self.room.give_back((run.count - steps) * self._growth)
        run.count = steps
        self._plan_end(run.after(steps))

    def _wake(self) -> None:
        """Begin a step, or end the current run early, since something new has come."""
        if self._step is None:
            self._begin()
        else:
            self.interrupt()

    # --- steps ----------------------------------------------------------------------------------------

    def _begin(self) -> None:
        was_busy = self.is_busy
        self._plan_step()
        if self.is_busy != was_busy:
            for other in self.neighbours:
                other.interrupt()

    def _plan_step(self) -> None:
        self._step, self._run = [], None
        while self._joining and self._has_row:
            self._add_row(self._joining.pop(0))
        self._make_room_for_rows()
        self.room.reserve(self._growth)
        step = self._schedule()
        rows, context = len(self._rows), self._context
        if not step and not rows:
            self._step = None
            return
        now, costs = self._events.now, self._costs
        self._step, self._began = step, now
        if not step:
            count = self._longest_run()
            self.room.reserve((count - 1) * self._growth)
            slower = self._slower(self._profile.decode_beside)
            first_s = costs.decode_s(rows, context)
            growth_s = costs.context_s * rows * costs.tokens_per_row
            self._run = DecodeRun(now, slower * first_s, slower * growth_s, count)
            self._plan_end(self._run.after(count))
            return
        seconds, parts = 0.0, 0
        for sequence, count in step:
            if count == 1:
                rows, context = rows + 1, context + sequence.computed
            else:
                parts += 1
                seconds += costs.chunks_s(count, sequence.computed, count)
        seconds -= max(parts - 1, 0) * costs.chunk_s
        seconds *= self._slower(self._profile.prefill_beside)
        seconds += self._slower(self._profile.decode_beside) * costs.decode_s(rows, context)
        self._plan_end(now + seconds)

    def _slower(self, beside: float) -> float:
        """Return how many times as long work takes while the neighbours work."""
        if not self.neighbours:
            return 1.0
        working = sum(other.is_busy for other in self.neighbours) / len(self.neighbours)
        return 1 + working * (beside - 1)

    def _plan_end(self, time: float) -> None:
        self._version += 1
        self._ends, version = time, self._version
        self._events.at(time, lambda: self._end(version))

    @property
    def _growth(self) -> float:
        """Return the KV room that one step of the rows takes."""
        return self._row_growth * self._costs.tokens_per_row

    def _longest_run(self) -> int:
        """Return the number of steps until a row ends or room runs out; the first step has its room
        already.
        """
        ends = self._rows[0][0] - self._steps
        return min(ends, 1 + int(self.room.available / self._growth)) if self._growth else ends

    def _end(self, version: int) -> None:
        if version != self._version:
            return  # the run was cut short
        step, run = self._step, self._run
        assert step is not None
        self._run = None  # later events belong to the time after this run
        self._decoded(run.count if run is not None else 1)
        for sequence, count in step:
            self._computed(sequence, count)
        while self._rows and self._rows[0][0] <= self._steps:
            sequence = heapq.heappop(self._rows)[2]
            self._leave_rows(sequence)
            self._finish(sequence)
        self._begin()

    def _decoded(self, steps: int) -> None:
        if self._rows:
            self.decode_s += self._events.now - self._began
            self.row_seconds += (self._events.now - self._began) * len(self._rows)
        self._context += steps * len(self._rows) * self._costs.tokens_per_row
        self._steps += steps

    def _computed(self, sequence: SimulatedSequence, count: int) -> None:
        if sequence not in self._prefilling:
            return  # the sequence was preempted
        sequence.computed += count
        full = sequence.computed // self.room.block_tokens
        self.room.publish(sequence.held, sequence.blocks[:full])
        if sequence.uncomputed == 0:
            self._leave_prefill(sequence)
            self._add_token(sequence)
        elif sequence.hands_over:
            self.on_computed(sequence)

    def _add_token(self, sequence: SimulatedSequence) -> None:
        """Add the token after a prompt."""
        sequence.left -= 1
        if not sequence.has_answered:
            sequence.has_answered = True
            self.on_first_token(sequence)
        if sequence.left <= 0:
            self._finish(sequence)
        elif sequence.hands_over:
            self.on_computed(sequence)
        else:
            self._add_row(sequence)

    def _finish(self, sequence: SimulatedSequence) -> None:
        self.room.free(sequence.held)
        self.on_finished(sequence)
        self.on_room()

    # --- rows -----------------------------------------------------------------------------------------

    def _add_row(self, sequence: SimulatedSequence) -> None:
        sequence.began_at = self._steps
        ends_at = self._steps + ceil(sequence.left / self._costs.tokens_per_row)
        heapq.heappush(self._rows, (ends_at, sequence.order, sequence))
        self._context += sequence.num_tokens
        self.room.settle(sequence.held, sequence.num_tokens)
        sequence.growth = self.room.keeping.growth(sequence.num_tokens, sequence.left)
        self._row_growth += sequence.growth

    def _leave_rows(self, sequence: SimulatedSequence) -> float:
        """Remove a row. Return how many tokens it has generated as one."""
        grown = (self._steps - sequence.began_at) * self._costs.tokens_per_row
        sequence.held.private += grown * sequence.growth
        self._context -= sequence.num_tokens + grown
        self._row_growth = sum(row[2].growth for row in self._rows)
        return grown

    def _make_room_for_rows(self) -> None:
        while self._rows and self.room.available < self._growth:
            if self._joining:
                self._preempt(self._joining[-1])
                continue
            others = [sequence for sequence in self._prefilling if not sequence.hands_over]
            victim = max((*others, *(row[2] for row in self._rows)), key=lambda sequence: sequence.order)
            self._preempt(victim)

    def _preempt(self, victim: SimulatedSequence) -> None:
        """Release its room; it is computed again later, with the tokens that it has generated."""
        if victim in self._prefilling:
            self._leave_prefill(victim)
        elif victim in self._joining:
            self._joining.remove(victim)
        else:
            self._rows = [row for row in self._rows if row[2] is not victim]
            heapq.heapify(self._rows)
            grown = self._leave_rows(victim)
            victim.num_tokens += int(grown)
            victim.left -= grown
        self.room.free(victim.held)
        victim.holding, victim.computed = None, 0
        self.num_preemptions += 1
        bisect.insort(self._waiting, victim, key=lambda waiting: waiting.order)

    @property
    def _has_row(self) -> bool:
        return len(self._rows) + len(self._prefilling) < self._profile.max_num_seqs

    # --- prompts --------------------------------------------------------------------------------------

    def _schedule(self) -> list[tuple[SimulatedSequence, int]]:
        """Return the parts of prompts that the next step computes in addition to the rows."""
        budget = self._costs.chunk_tokens - len(self._rows)
        self._bound.begin(len(self._rows), int(self._context))
        step: list[tuple[SimulatedSequence, int]] = []
        for sequence in self._prefilling:
            budget -= self._add_chunk(sequence, budget, step)
        waiting = 0
        while budget > 0 and waiting < len(self._waiting) and not self._bound.is_full:
            sequence = self._waiting[waiting]
            if not self._has_row:
                break
            covered = self.room.covered(sequence.blocks)
            if self._computing.keys() & sequence.blocks[covered : covered + 1]:
                waiting += 1  # another sequence computes the block that it needs next
                continue
            if not self._admit(sequence, covered):
                break
            del self._waiting[waiting]
            budget -= self._add_chunk(sequence, budget, step)
        return step

    def _add_chunk(
        self, sequence: SimulatedSequence, budget: int, step: list[tuple[SimulatedSequence, int]]
    ) -> int:
        count = max(min(budget, sequence.uncomputed), 0)
        if count > 1:
            count = self._bound.tokens(count, sequence.computed)
        if count > 0:
            step.append((sequence, count))
        return count

    def _admit(self, sequence: SimulatedSequence, covered: int) -> bool:
        """Start a sequence if there is room for all of it."""
        room, blocks = self.room, sequence.blocks[:covered]
        spare = self._profile.block_size * (len(self._rows) + len(self._prefilling))
        if room.lacks(blocks, sequence.num_tokens) + spare > room.available:
            return False
        sequence.holding = room.take(blocks, sequence.num_tokens)
        sequence.computed = min(covered * room.block_tokens, sequence.num_tokens - 1)
        self._prefilling.append(sequence)
        self._computing.update(dict.fromkeys(sequence.blocks[covered:], sequence))
        if not sequence.was_admitted:
            sequence.was_admitted = True
            self.on_scheduled(sequence)
        return True

    def _leave_prefill(self, sequence: SimulatedSequence) -> None:
        self._prefilling.remove(sequence)
        for block in sequence.blocks:
            if self._computing.get(block) is sequence:
                del self._computing[block]
