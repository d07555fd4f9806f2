"""Continuous batching: which sequences run in the next step, and how many tokens of each.

Running sequences come first, so that decoding never waits for a new prompt; waiting prompts get the rest of
the token budget, in prefill chunks. Sequences that have blocks already, because another worker computed their
prompts, get free rows first. A prompt waits while another sequence computes blocks that both share, so that
`n` answers to one prompt, or a batch with one preamble, compute it once. A prompt also waits while its next
blocks are read from the disk. When blocks run out, the sequence that would run last is preempted: its blocks
are freed, and later computed again unless a tier below the pool has kept them.
"""

from __future__ import annotations

import bisect
import time
from dataclasses import dataclass, field
from math import inf

from costs.steps import ChunkBound
from engine.kv.block_manager import BlockManager
from engine.kv.prefix_cache import admit, missing_blocks
from engine.kv.tiers.host import HostTier
from engine.step.draft import Outcome
from engine.step.sequence import SequenceStage, SequenceState
from engine.step.slot_allocator import StateSlotAllocator
from protocol.ids import BlockIdentity, root_identity
from protocol.outputs import TokenOutput
from protocol.requests import EngineRequest


@dataclass
class ScheduledStep:
    """One packed forward: `num_tokens[i]` tokens of `sequences[i]`, from its `num_computed` on, then its
    draft.

    `admitted` are the sequences that got blocks in this step, `first_time` the requests of those that never
    had blocks before. `expired` are the errors of requests past their time limit. `outcomes` has one entry
    for each sequence once the step is over.
    """

    sequences: list[SequenceState] = field(default_factory=list)
    num_tokens: list[int] = field(default_factory=list)
    admitted: list[SequenceState] = field(default_factory=list)
    first_time: list[EngineRequest] = field(default_factory=list)
    expired: list[TokenOutput] = field(default_factory=list)
    outcomes: list[Outcome] = field(default_factory=list)
    budget_left: int = 0
    """Number of draft tokens that may still be added to the step."""

    @property
    def total_tokens(self) -> int:
        return sum(self.num_tokens)

    @property
    def only_decodes(self) -> bool:
        """Whether each sequence computes only its newest token and its draft."""
        return self.total_tokens == len(self.sequences)


class Scheduler:
    def __init__(
        self,
        blocks: BlockManager,
        *,
        model: str,
        kv_format: str,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        fetcher: HostTier | None = None,
        bound: ChunkBound | None = None,
        slot_allocator: StateSlotAllocator | None = None,
    ) -> None:
        self.blocks = blocks
        self.running: list[SequenceState] = []
        self.waiting: list[SequenceState] = []
        self.num_preemptions = 0
        self.prefix_query_tokens = 0
        self.prefix_hit_tokens = 0
        self._model = model
        self._kv_format = kv_format
        self._roots: dict[str, BlockIdentity] = {}
        self._blocked: tuple[int, int] | None = None
        self._waited_s, self._waits_since = 0.0, 0.0
        self._max_num_seqs = max_num_seqs
        self._max_num_batched_tokens = max_num_batched_tokens
        self._fetcher = fetcher
        self._bound = bound
        self._slot_allocator = slot_allocator

    def root(self, request: EngineRequest, foreign_format: str = "") -> BlockIdentity:
        """Return the parent identity of the first block of a tenant's sequences.

        With a `foreign_format` blocks hold other values than this worker would compute. They have other
        identities, since a request's tokens must not depend on the worker that computed its prefix.
        """
        kv_format = f"{self._kv_format} from {foreign_format}" if foreign_format else self._kv_format
        cache_salt, adapter = request.tenant
        if cache_salt or adapter:
            return root_identity(self._model, kv_format, cache_salt, adapter)
        if kv_format not in self._roots:
            self._roots[kv_format] = root_identity(self._model, kv_format)
        return self._roots[kv_format]

    def add_waiting(self, sequence: SequenceState) -> None:
        """Queue the sequence: those that have blocks first, the others by `queue_key`."""
        sequence.stage = SequenceStage.WAITING
        bisect.insort(
            self.waiting, sequence, key=lambda other: (other.sequence_blocks is None, other.queue_key)
        )

    def hold(self, sequence: SequenceState) -> None:
        """Stop running the sequence, which keeps its blocks. One without blocks stays queued to get them."""
        if sequence.sequence_blocks is not None:
            self._leave_queue(sequence)
            sequence.stage = SequenceStage.HELD

    def remove(self, sequence: SequenceState) -> None:
        """End the sequence in any stage, but leave its blocks to `free`."""
        self._leave_queue(sequence)
        sequence.stage = SequenceStage.ENDED

    def _leave_queue(self, sequence: SequenceState) -> None:
        if sequence.stage is SequenceStage.RUNNING:
            self.running.remove(sequence)
            if self._slot_allocator is not None:
                self._slot_allocator.end(sequence)
        elif sequence.stage is SequenceStage.WAITING:
            self.waiting.remove(sequence)

    def free(self, sequence: SequenceState) -> None:
        if sequence.sequence_blocks is not None:
            sequence.sequence_blocks.free()
            sequence.sequence_blocks = None

    @property
    def num_active(self) -> int:
        """Number of sequences that run or are about to."""
        return self.num_active_with(len(self.running))

    def num_active_with(self, num_running: int) -> int:
        """Return `num_active` for the case that `num_running` sequences continue to run."""
        return min(num_running + len(self.waiting), self._max_num_seqs)

    def schedule(self) -> ScheduledStep:
        step = ScheduledStep()
        budget = self._max_num_batched_tokens
        for sequence in [
            each for each in self.waiting if each.sequence_blocks is not None and each.has_grammar
        ]:
            if self._has_row:
                self._run(sequence)
                if self._slot_allocator is not None:
                    self._slot_allocator.begin(sequence)
        self._meet_followers()
        rows: list[SequenceState] = []
        prompts: list[SequenceState] = []
        for sequence in self.running:
            (prompts if sequence.num_uncomputed > 1 else rows).append(sequence)
        if self._bound is not None:
            context = sum([sequence.num_computed for sequence in rows])
            strictest_s = min([sequence.request.slo_tpot_s for sequence in rows], default=inf)
            self._bound.begin(len(rows), context, strictest_s)
        for sequence in rows + prompts:
            if budget == 0:
                break
            if sequence.stage is not SequenceStage.RUNNING:
                continue  # preempted in this step for an earlier sequence
            budget -= self._schedule_running(sequence, budget, step)
        lacks_room = False
        for sequence in list(self.waiting):
            if budget == 0 or not self._has_row:
                break
            if self._bound is not None and self._bound.is_full:
                break
            if sequence.sequence_blocks is not None or not sequence.has_grammar:
                continue
            if self._waits_for_a_leader(sequence) or self._waits_for_the_disk(sequence):
                continue
            taken = self._admit(sequence, budget, step)
            if taken == 0:
                lacks_room = True
                break
            budget -= taken
        self._note_room(not lacks_room)
        step.budget_left = budget
        return step

    def following(self, step: ScheduledStep) -> ScheduledStep | None:
        """Return the step after `step`, whose tokens are not known yet: one more token for each sequence
        that does not reach `max_tokens`. Return None if the next step may have to be another one.
        """
        if self._may_admit or len(step.sequences) < len(self.running):
            return None
        following = ScheduledStep()
        for sequence, count in zip(step.sequences, step.num_tokens, strict=True):
            if count < sequence.num_uncomputed or not sequence.may_run_ahead:
                return None
            if len(sequence.output_token_ids) + 1 < sequence.params.max_tokens:
                place = len(sequence.token_ids)
                if not sequence.held.grow(place, place + 1):
                    return None
                self._append(sequence, 1, following)
        return following if following.sequences else None

    @property
    def _may_admit(self) -> bool:
        """Whether the next step may admit a waiting sequence."""
        if not self.waiting or not self._has_row:
            return False
        order, available = self._blocked or (None, 0)
        return self.waiting[0].order != order or self.blocks.available > available

    @property
    def _has_row(self) -> bool:
        return len(self.running) < self._max_num_seqs

    def _run(self, sequence: SequenceState) -> None:
        """Move a waiting sequence, which has blocks now, to the running ones."""
        self.waiting.remove(sequence)
        sequence.stage = SequenceStage.RUNNING
        self.running.append(sequence)

    @property
    def room_wait_s(self) -> float:
        """Seconds in which a request waited for blocks. May be read from any thread."""
        since = self._waits_since
        return self._waited_s + (time.monotonic() - since if since else 0.0)

    def _note_room(self, has_room: bool) -> None:
        """Note whether the first waiting sequence found blocks in this step."""
        if has_room and self._waits_since:
            self._waited_s += time.monotonic() - self._waits_since
            self._waits_since = 0.0
        elif not has_room and not self._waits_since:
            self._waits_since = time.monotonic()

    def make_room(self, step: ScheduledStep, sequence: SequenceState, wanted: int) -> int:
        """Reserve room for up to `wanted` draft tokens of a decoding sequence; return how many got room."""
        left = sequence.params.max_tokens - len(sequence.output_token_ids) - 1
        room = min(wanted, left, step.budget_left)
        if self._slot_allocator is not None:
            room = min(room, self._slot_allocator.room(sequence))
        if room <= 0 or not sequence.held.grow(sequence.num_computed, len(sequence.token_ids) + room):
            return 0
        step.budget_left -= room
        return room

    def _waits_for_a_leader(self, sequence: SequenceState) -> bool:
        if not sequence.follows():
            sequence.leader = self._find_leader(sequence)
        return sequence.leader is not None

    def _meet_followers(self) -> None:
        """Plan to keep the states of running prompts at the ends of prefixes that waiting prompts share."""
        if self._slot_allocator is not None:
            for sequence in self.waiting[: self._max_num_seqs]:
                self._waits_for_a_leader(sequence)

    def _find_leader(self, sequence: SequenceState) -> tuple[SequenceState, int] | None:
        if not self.blocks.enable_prefix_caching or sequence.wants_prompt_logprobs:
            return None
        for other in self.running:
            if other.num_uncomputed > 1 and other.request.tenant == sequence.request.tenant:
                num_shared = self._shared_tokens(sequence.token_ids, other.token_ids, other.num_computed)
                if self._slot_allocator is not None:
                    num_shared = self._slot_allocator.share(other, sequence, num_shared)
                if num_shared > other.num_computed:
                    return other, num_shared
        return None

    def _waits_for_the_disk(self, sequence: SequenceState) -> bool:
        if self._fetcher is None or sequence.wants_prompt_logprobs:
            return False
        if sequence.fetch is None:
            root = self.root(sequence.request)
            sequence.fetch = self._fetcher.fetch(*missing_blocks(self.blocks, sequence.token_ids, root))
        return self._fetcher.is_pending(sequence.fetch)

    def _shared_tokens(self, ours: list[int], theirs: list[int], computed: int) -> int:
        """Return the token count of equal leading full blocks; 0 if the first `computed` tokens differ."""
        size = self.blocks.block_size
        end = computed // size * size
        if ours[:end] != theirs[:end]:
            return 0
        longest = min(len(ours), len(theirs)) // size * size
        while end < longest and ours[end : end + size] == theirs[end : end + size]:
            end += size
        return end

    def _schedule_running(self, sequence: SequenceState, budget: int, step: ScheduledStep) -> int:
        count = self._chunk(sequence, budget)
        if count == 0:
            return 0
        while not sequence.held.grow(sequence.num_computed, sequence.num_computed + count):
            victim = self._last_to_run()
            if victim is None:
                return 0
            self._preempt(victim, step)
            if victim is sequence:
                return 0
        self._append(sequence, count, step)
        return count

    def _last_to_run(self) -> SequenceState | None:
        """Return the sequence with blocks that would run last. Never return a prompt that is being handed
        over, since its blocks may be on the wire. Return None if only such prompts have blocks: one of them
        may need more while other sequences still refer to blocks that it left behind its sliding window.
        """
        ready = [waiting for waiting in self.waiting if waiting.sequence_blocks is not None]
        running = (running for running in self.running if not running.prefill_only)
        return ready[-1] if ready else max(running, key=lambda running: running.queue_key, default=None)

    def _admit(self, sequence: SequenceState, budget: int, step: ScheduledStep) -> int:
        """Admit a waiting sequence if all of it fits; return its tokens in this step."""
        if self._blocked == (sequence.order, self.blocks.available):
            return 0
        found = admit(
            self.blocks,
            sequence.token_ids,
            self.root(sequence.request),
            # A cached prompt has no logits, so one that wants log-probabilities shares nothing.
            shares_prefix=not sequence.wants_prompt_logprobs,
            # A spare block for each running sequence keeps a newcomer from being preempted at once.
            spare=len(self.running),
            hands_over=sequence.prefill_only,
        )
        if found is None:
            self._blocked = (sequence.order, self.blocks.available)
            return 0
        sequence.sequence_blocks, sequence.num_computed = found
        self._run(sequence)
        if self._slot_allocator is not None:
            self._slot_allocator.admit(sequence)
            self._meet_followers()
        step.admitted.append(sequence)
        if sequence.first_scheduled is None:
            sequence.first_scheduled = time.monotonic()
            sequence.num_cached = sequence.num_computed
            self.prefix_query_tokens += len(sequence.token_ids)
            self.prefix_hit_tokens += sequence.num_computed
            step.first_time.append(sequence.request)
        count = self._chunk(sequence, budget)
        self._append(sequence, count, step)
        return count

    def _chunk(self, sequence: SequenceState, budget: int) -> int:
        """Return how many of the sequence's tokens this step computes."""
        count = min(budget, sequence.num_uncomputed)
        if self._slot_allocator is not None:
            count = self._slot_allocator.chunk(sequence, count)
        if count > 1 and self._bound is not None:
            count = self._bound.tokens(count, sequence.num_computed)
        return count

    def _preempt(self, victim: SequenceState, step: ScheduledStep) -> None:
        if victim in step.sequences:
            index = step.sequences.index(victim)
            del step.sequences[index], step.num_tokens[index]
        self._leave_queue(victim)
        self.free(victim)
        victim.num_computed = 0
        victim.prompt_logprobs.clear()
        victim.fetch = None
        self.num_preemptions += 1
        self.add_waiting(victim)

    @staticmethod
    def _append(sequence: SequenceState, count: int, step: ScheduledStep) -> None:
        step.sequences.append(sequence)
        step.num_tokens.append(count)
