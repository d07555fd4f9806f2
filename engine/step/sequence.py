"""The engine's state of one sequence: its tokens, its blocks and how much of it is computed."""

from __future__ import annotations

import enum
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from llguidance import LLMatcher

from engine.kv.sequence_blocks import SequenceBlocks
from engine.kv.tiers.host import DiskFetch
from engine.sampler.edits import common_prefix
from engine.sampler.rows import SamplingRow, needs_history
from engine.step.draft import Draft
from protocol.outputs import TokenLogprobs
from protocol.requests import DraftPlan, EngineRequest
from protocol.sampling import SamplingParams

_LIKELIEST = SamplingParams(max_tokens=1, temperature=0.0)


class SequenceStage(enum.Enum):
    WAITING = "waiting"
    RUNNING = "running"
    HELD = "held"
    """A sequence that has blocks but does not run: it is to be handed over, or has drafted enough."""
    ENDED = "ended"


@dataclass(eq=False)
class SequenceState:
    """Prompt and output of one request.

    `num_computed` tokens have their KV in the pool. The others must still be run: at first the prompt, after
    a preemption all tokens, during decoding the last token only.
    """

    request: EngineRequest
    order: int
    request_id: str = field(init=False)
    params: SamplingParams = field(init=False)
    prefill_only: bool = False
    drafts_elsewhere: bool = False
    hold_at: int | None = None
    """Length at which a sequence that drafts for a target's is held. Such a sequence never ends by itself."""
    stage: SequenceStage = SequenceStage.WAITING
    prompt_token_ids: list[int] = field(init=False)
    output_token_ids: list[int] = field(init=False)
    token_ids: list[int] = field(init=False)
    num_computed: int = 0
    num_cached: int | None = None
    handed_over: bool = False
    """Whether another worker computed the prompt."""
    sequence_blocks: SequenceBlocks | None = None
    state_slot: int = 0
    """State slot of the running sequence, if the model has recurrent layers."""
    keep_at: list[int] = field(default_factory=list)
    """Positions after which the recurrent state is to be kept, ascending."""
    adapter: int = 0
    """Slot of the sequence's LoRA adapter, held until the sequence ends; 0: no adapter."""
    prompt_logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    arrival: float = field(default_factory=time.monotonic)
    first_scheduled: float | None = None
    first_token_time: float | None = None
    leader: tuple[SequenceState, int] | None = None
    """The sequence that computes a prefix which this waiting one shares, and the prefix's token count."""
    grammar: Future[LLMatcher] | None = None
    """The sequence's grammar, perhaps still being compiled."""
    fetch: DiskFetch | None = None
    """The read of blocks that were on the disk when the sequence was to be admitted."""
    draft: Draft | None = None
    """The draft that the current step verifies."""
    num_given: int = field(init=False)
    """Number of leading tokens that the target has committed, if the sequence drafts for a target."""
    draft_plan: DraftPlan | None = field(init=False)
    """The place and method of drafting for this sequence."""

    def __post_init__(self) -> None:
        self.request_id, self.params = self.request.request_id, self.request.sampling
        self.prompt_token_ids = self.request.prompt_token_ids
        self.output_token_ids = list(self.request.output_token_ids)
        self.token_ids = self.prompt_token_ids + self.output_token_ids
        self.deadline = self.arrival + self.request.timeout_s
        self.num_given = len(self.token_ids)
        self.draft_plan = self.request.draft_plan

    @property
    def held(self) -> SequenceBlocks:
        """The sequence's blocks; it must have blocks."""
        assert self.sequence_blocks is not None
        return self.sequence_blocks

    @property
    def position(self) -> int:
        """Absolute position of the next token, which keys its sampling noise."""
        return len(self.token_ids)

    def sampling_row(self, drafted: Sequence[int] = ()) -> SamplingRow:
        """Return the row that samples the next token, or the token after the `drafted` ones."""
        prompt, output = self.prompt_token_ids, self.output_token_ids
        position = len(self.token_ids) + len(drafted)
        return SamplingRow(self.params, prompt, output, position, self.request_id, drafted)

    def row_after(self, count: int) -> SamplingRow:
        """Return the row for the token after `count` draft tokens, for parameters that need no history."""
        prompt, output = self.prompt_token_ids, self.output_token_ids
        return SamplingRow(self.params, prompt, output, len(self.token_ids) + count, self.request_id)

    def step_rows(self) -> list[SamplingRow]:
        """Return the rows for the next token and for the token after each draft token. The row after a probe
        takes the model's likeliest token.
        """
        draft = self.draft
        if draft is None:
            return [self.sampling_row()]
        if needs_history(self.params):
            rows = [self.sampling_row(), *map(self.sampling_row, draft.paths())]
        else:
            rows = [self.row_after(depth) for depth in (0, *draft.depths())]
        probe = SamplingRow(_LIKELIEST, [], [], self.position, self.request_id)
        return rows + [probe] * len(draft.probes)

    @property
    def has_grammar(self) -> bool:
        """Whether the sequence's grammar is compiled; True if it needs none."""
        return self.grammar is None or (self.grammar.done() and self.grammar.exception() is None)

    @property
    def grammar_error(self) -> BaseException | None:
        """The error if the sequence's grammar could not be compiled."""
        return self.grammar.exception() if self.grammar is not None and self.grammar.done() else None

    @property
    def num_uncomputed(self) -> int:
        return len(self.token_ids) - self.num_computed

    @property
    def may_run_ahead(self) -> bool:
        """Whether a token can be sampled before the host knows the previous one."""
        params = self.params
        needs_step = self.wants_prompt_logprobs or params.logprobs is not None or self.prefill_only
        return not (needs_step or needs_history(params) or self.hold_at is not None)

    @property
    def queue_key(self) -> tuple[int, int]:
        """Sort key of the queue: priority, then age. The lowest key runs first."""
        return (self.request.priority, self.order)

    @property
    def wants_prompt_logprobs(self) -> bool:
        if self.params.prompt_logprobs is None or self.first_token_time is not None:
            return False
        return len(self.prompt_logprobs) < len(self.prompt_token_ids)

    def follows(self) -> bool:
        """Return whether the leader must still compute a part of the shared prefix."""
        if self.leader is None:
            return False
        sequence, num_shared = self.leader
        return sequence.stage is SequenceStage.RUNNING and sequence.num_computed < num_shared

    @property
    def is_decoding(self) -> bool:
        """Whether the sequence decodes here: only the KV of its last token is missing."""
        is_next = self.stage is SequenceStage.RUNNING and self.num_uncomputed == 1
        return is_next and bool(self.output_token_ids) and not self.prefill_only

    @property
    def is_to_be_held(self) -> bool:
        """Whether the sequence is to be held with the tokens that it has now."""
        return self.prefill_only or (self.hold_at is not None and len(self.token_ids) >= self.hold_at)

    @property
    def drafted(self) -> list[int]:
        """The draft tokens after the given ones, if the sequence drafts for a target."""
        return self.token_ids[self.num_given :]

    def append(self, token_id: int) -> None:
        self.output_token_ids.append(token_id)
        self.token_ids.append(token_id)

    def give(self, token_ids: Sequence[int]) -> int:
        """Append tokens that the target has committed after the given ones. Draft tokens that agree with
        them stay, with their KV; the others are dropped. Return how many draft tokens agreed.
        """
        start, drafted = self.num_given, self.drafted
        agreed = common_prefix(drafted, token_ids)
        self.num_given += len(token_ids)
        if agreed < len(token_ids):
            wrong = len(drafted) - agreed
            del self.token_ids[start + agreed :]
            self.output_token_ids = self.output_token_ids[: len(self.output_token_ids) - wrong]
            self.num_computed = min(self.num_computed, start + agreed)
            for token_id in token_ids[agreed:]:
                self.append(token_id)
        return agreed
