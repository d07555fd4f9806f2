"""The sequences in the engine by request, and the records that it returns to the worker's loop.

A step's tokens become output up to the one that ends a sequence.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from engine.kv.block_manager import BlockManager
from engine.kv.sequence_blocks import SequenceBlocks
from engine.lora.table import Adapters
from engine.sampler import Sampler
from engine.step.draft import Outcome, Verdict
from engine.step.launch import StepLauncher
from engine.step.scheduler import ScheduledStep, Scheduler
from engine.step.sequence import SequenceState
from engine.step.slot_allocator import StateSlotAllocator
from engine.step.speculation_interface import Speculator
from protocol.handoff import Extent
from protocol.outputs import ErrorKind, FinishReason, RequestTiming, TokenOutput, logprobs_pages
from protocol.requests import EngineRequest


class LiveSequences(dict[str, SequenceState]):
    def __init__(
        self,
        scheduler: Scheduler,
        launcher: StepLauncher,
        sampler: Sampler,
        speculator: Speculator,
        slot_allocator: StateSlotAllocator | None,
        adapters: Adapters | None,
        eos: Collection[int],
    ) -> None:
        super().__init__()
        self.launcher = launcher
        self.sampler = sampler
        self._scheduler = scheduler
        self._speculator = speculator
        self._slot_allocator = slot_allocator
        self._adapters = adapters
        self._eos = frozenset(eos)

    def take(self, sequence: SequenceState) -> None:
        if self._adapters is not None:
            sequence.adapter = self._adapters.acquire(sequence.request.adapter)
        self[sequence.request_id] = sequence

    def commit(
        self, sequence: SequenceState, count: int, verdict: Verdict | None, step: ScheduledStep
    ) -> TokenOutput | None:
        """Commit the KV of `count` tokens and of accepted draft tokens; return the sequence's output."""
        start, draft, sequence.draft = sequence.num_computed, sequence.draft, None
        first_drafted = start + count
        num_rows = count + (len(draft.token_ids) if draft is not None else 0)
        chosen = verdict.token_ids if verdict is not None and not verdict.failed else []
        kept = keep_tokens(sequence, chosen, self._eos)
        accepted = verdict.accepted[: len(kept.token_ids)] if verdict is not None else []
        sequence.num_computed = first_drafted + len(accepted)
        outcome = Outcome(start, count + len(accepted), num_rows, len(accepted), draft, verdict)
        step.outcomes.append(outcome)
        if verdict is not None and verdict.failed:
            problem = self.sampler.problem(sequence.request_id)
            return self._fail(sequence, *failure(sequence, problem))
        if sequence.hold_at is None:
            sequence.held.commit(first_drafted, accepted, sequence.token_ids)
        else:
            sequence.held.commit(min(sequence.num_computed, sequence.num_given), [], sequence.token_ids)
        if self._slot_allocator is not None:
            self._slot_allocator.stepped(sequence, first_drafted, accepted)
        if verdict is None:
            return None
        output = token_output(sequence, kept, outcome)
        if kept.finish_reason is not None:
            self.forget(sequence)
        elif sequence.is_to_be_held:
            self._scheduler.hold(sequence)
        return output

    def refuse(self) -> list[TokenOutput]:
        """Fail the sequences whose grammar could not be compiled."""
        return [
            self._fail(sequence, "invalid", str(error))
            for sequence in list(self._scheduler.waiting)
            if (error := sequence.grammar_error) is not None
        ]

    def expire(self) -> list[TokenOutput]:
        """Fail the sequences that are past their time limit."""
        now = time.monotonic()
        queued = self._scheduler.running + self._scheduler.waiting
        return [
            self._fail(sequence, "timeout", f"not finished within {sequence.request.timeout_s:g} s")
            for sequence in queued
            if now > sequence.deadline
        ]

    def forget(self, sequence: SequenceState) -> None:
        """End a sequence in any stage."""
        self._scheduler.remove(sequence)
        self.launcher.keep(sequence)
        self._scheduler.free(sequence)
        self.sampler.forget(sequence.request_id)
        self._speculator.forget(sequence)
        del self[sequence.request_id]
        if self._adapters is not None:
            self._adapters.release(sequence.adapter)

    def _fail(self, sequence: SequenceState, kind: ErrorKind, reason: str) -> TokenOutput:
        self.forget(sequence)
        return TokenOutput(
            request_id=sequence.request_id, token_ids=[], finish_reason="error", error_kind=kind, error=reason
        )


@dataclass(slots=True)
class KeptTokens:
    """Tokens that became output, and the reason if they end the sequence."""

    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None


def keep_tokens(sequence: SequenceState, token_ids: Sequence[int], eos: Collection[int]) -> KeptTokens:
    """Append the tokens to the sequence, up to the token that ends it."""
    kept = KeptTokens()
    for token_id in token_ids:
        sequence.append(token_id)
        kept.token_ids.append(token_id)
        if sequence.hold_at is None:
            num_tokens = len(sequence.output_token_ids)
            kept.finish_reason, kept.stop_token_id = sequence.params.end(token_id, num_tokens, eos)
        if kept.finish_reason is not None:
            break
    return kept


def failure(sequence: SequenceState, problem: str) -> tuple[ErrorKind, str]:
    """Return why no token has a finite score; `problem` is the error of the sequence's grammar."""
    if sequence.params.grammar is not None:
        place = len(sequence.output_token_ids)
        reason = f"the structured output cannot go on: no token may follow its {place} tokens"
        return "grammar", f"{reason} ({problem})" if problem else reason
    return "internal", "no token has a finite score (every token forbidden, or the model computed NaN)"


def token_output(sequence: SequenceState, kept: KeptTokens, outcome: Outcome) -> TokenOutput:
    assert outcome.verdict is not None
    is_first = sequence.first_token_time is None
    draft = outcome.draft
    logprobs = outcome.verdict.logprobs[: len(kept.token_ids)]
    return TokenOutput(
        request_id=sequence.request_id,
        token_ids=kept.token_ids,
        position=len(sequence.output_token_ids) - len(kept.token_ids),
        finish_reason=kept.finish_reason,
        stop_token_id=kept.stop_token_id,
        logprobs=[entry for entry in logprobs if entry is not None] or None,
        prompt_logprobs=(logprobs_pages(sequence.prompt_logprobs) or None) if is_first else None,
        cached_tokens=sequence.num_cached if is_first else None,
        timing=_first_token_timing(sequence) if is_first else None,
        drafted_tokens=draft.num_nodes if draft is not None else 0,
        predicted_tokens=min(draft.num_predicted, draft.num_nodes) if draft is not None else 0,
        accepted_tokens=outcome.num_accepted,
    )


def _first_token_timing(sequence: SequenceState) -> RequestTiming:
    sequence.first_token_time = time.monotonic()
    scheduled = sequence.first_scheduled or sequence.arrival
    return RequestTiming(
        queue_s=scheduled - sequence.arrival, prefill_s=sequence.first_token_time - scheduled
    )


@dataclass(frozen=True, eq=False)
class Reservation:
    """Blocks for a prompt that another worker computes. KV before token `covered` is here or not needed.

    The caller of `Engine.reserve` owns the reservation until it calls `Engine.activate` or frees
    `sequence_blocks`. The request's time limit counts from `since` (monotonic seconds).
    """

    request: EngineRequest
    sequence_blocks: SequenceBlocks
    covered: int
    since: float

    @property
    def extents(self) -> list[Extent]:
        """The blocks for the tokens and the state, as other workers address them."""
        num_tokens = len(self.request.prompt_token_ids) + len(self.request.output_token_ids)
        return self.sequence_blocks.extents(-(-num_tokens // self.sequence_blocks.manager.block_size))

    @property
    def first_tokens(self) -> list[int]:
        """The first token whose block must still arrive, for each block table."""
        size = self.sequence_blocks.manager.block_size
        return [max(self.covered, place * size) for place in self.sequence_blocks.first_places]

    @property
    def num_cached(self) -> int:
        """Number of tokens found in the cache; 0 if the covered tokens all precede the sliding windows."""
        before_windows = min(self.sequence_blocks.first_places) * self.sequence_blocks.manager.block_size
        return self.covered if self.covered > before_windows else 0


@dataclass
class StepResult:
    outputs: list[TokenOutput] = field(default_factory=list)
    num_tokens: int = 0


@dataclass(frozen=True)
class EngineStats:
    num_running: int
    num_waiting: int
    waiting_tokens: int
    total_blocks: int
    free_blocks: int
    cached_blocks: int
    num_preemptions: int
    prefix_query_tokens: int
    prefix_hit_tokens: int
    """Number of tokens that were not computed because some tier held their KV."""
    steps: int

    @classmethod
    def of(cls, scheduler: Scheduler, blocks: BlockManager, steps: int) -> EngineStats:
        return cls(
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting),
            waiting_tokens=sum(sequence.num_uncomputed for sequence in list(scheduler.waiting)),
            total_blocks=blocks.num_blocks,
            free_blocks=blocks.num_free,
            cached_blocks=blocks.num_cached,
            num_preemptions=scheduler.num_preemptions,
            prefix_query_tokens=scheduler.prefix_query_tokens,
            prefix_hit_tokens=scheduler.prefix_hit_tokens,
            steps=steps,
        )
