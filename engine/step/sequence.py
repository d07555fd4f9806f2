"""One sequence in the engine: its tokens, its blocks and how far it has come."""

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
    """It keeps its blocks and does not run: its prompt is to be handed over, or it has drafted enough."""
    ENDED = "ended"


@dataclass(eq=False)
class SequenceState:
    """Prompt and output of one request.

    `num_computed` tokens have their KV in the pool. The others must still be run: the prompt at first, after
    a preemption everything, in decode the last token alone.
    """

    request: EngineRequest
    order: int
    request_id: str = field(init=False)
    params: SamplingParams = field(init=False)
    prefill_only: bool = False
    drafts_elsewhere: bool = False
    hold_at: int | None = None
    """It drafts for a target's sequence: it is held with so many tokens, and never ends by itself."""
    stage: SequenceStage = SequenceStage.WAITING
    prompt_token_ids: list[int] = field(init=False)
    output_token_ids: list[int] = field(init=False)
    token_ids: list[int] = field(init=False)
    num_computed: int = 0
    num_cached: int | None = None
    handed_over: bool = False
    """Another worker computed its prompt."""
    sequence_blocks: SequenceBlocks | None = None
    state_slot: int = 0
    """The slot of the recurrent layers' state while it runs, if the model has some."""
    keep_at: list[int] = field(default_factory=list)
    """The positions after which that state is to be kept, ascending."""
    adapter: int = 0
    """The slot of its adapter, which it holds until it ends; 0: none."""
    prompt_logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    arrival: float = field(default_factory=time.monotonic)
    first_scheduled: float | None = None
    first_token_time: float | None = None
    leader: tuple[SequenceState, int] | None = None
    """The sequence that computes a prefix which this waiting one can share, and that prefix's tokens."""
    grammar: Future[LLMatcher] | None = None
    """Its grammar, which may still be being compiled."""
    fetch: DiskFetch | None = None
    """Its blocks that were on the disk when it was to be admitted."""
    draft: Draft | None = None
    """The draft that the current step verifies."""
    num_given: int = field(init=False)
    """Leading tokens that are certain, where it drafts."""
    draft_plan: DraftPlan | None = field(init=False)
    """The place and kind of its own drafts."""

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
        """Its blocks, while it has some."""
        assert self.sequence_blocks is not None
        return self.sequence_blocks

    @property
    def position(self) -> int:
        """Absolute position of the token that comes next; keys its noise."""
        return len(self.token_ids)

    def sampling_row(self, drafted: Sequence[int] = ()) -> SamplingRow:
        """The row for the token that comes next, or for the one after `drafted` ones."""
        prompt, output = self.prompt_token_ids, self.output_token_ids
        position = len(self.token_ids) + len(drafted)
        return SamplingRow(self.params, prompt, output, position, self.request_id, drafted)

    def row_after_next(self) -> SamplingRow:
        """The row for the token after the next one, which is unknown: see `may_run_ahead`."""
        return self.sampling_row([0])

    def chain_rows(self, drafted: list[int]) -> list[SamplingRow]:
        """The rows for the token that comes next, and for the one after each of the `drafted`."""
        if needs_history(self.params):
            return [self.sampling_row(drafted[:end]) for end in range(len(drafted) + 1)]
        return [self._row_behind(count) for count in range(len(drafted) + 1)]

    def _row_behind(self, count: int) -> SamplingRow:
        """The row for the token after so many drafted ones, which are not looked at."""
        position = self.position + count
        return SamplingRow(
            self.params, self.prompt_token_ids, self.output_token_ids, position, self.request_id
        )

    def step_rows(self) -> list[SamplingRow]:
        """The rows for the token after the last one, and for the one after each drafted token. After a probe
        only the model's likeliest token is wanted.
        """
        draft = self.draft
        if draft is None:
            return [self.sampling_row()]
        if draft.parents is None and not draft.probes:
            return self.chain_rows(draft.token_ids if needs_history(self.params) else draft.ids)
        if needs_history(self.params):
            rows = [self.sampling_row(), *map(self.sampling_row, draft.paths())]
        else:
            rows = [self._row_behind(depth) for depth in (0, *draft.depths())]
        probe = SamplingRow(_LIKELIEST, [], [], self.position, self.request_id)
        return rows + [probe] * len(draft.probes)

    @property
    def has_grammar(self) -> bool:
        """Whether its grammar is compiled, if it has one."""
        return self.grammar is None or (self.grammar.done() and self.grammar.exception() is None)

    @property
    def grammar_error(self) -> BaseException | None:
        """The reason why there will be no grammar."""
        return self.grammar.exception() if self.grammar is not None and self.grammar.done() else None

    @property
    def num_uncomputed(self) -> int:
        return len(self.token_ids) - self.num_computed

    @property
    def may_run_ahead(self) -> bool:
        """Whether a token can be chosen before the previous one is known, and nothing else is wanted."""
        params = self.params
        needs_step = self.wants_prompt_logprobs or params.logprobs is not None or self.prefill_only
        return not (needs_step or needs_history(params) or self.hold_at is not None)

    @property
    def queue_key(self) -> tuple[int, int]:
        """Lower runs first: priority, then age."""
        return (self.request.priority, self.order)

    @property
    def wants_prompt_logprobs(self) -> bool:
        if self.params.prompt_logprobs is None or self.first_token_time is not None:
            return False
        return len(self.prompt_logprobs) < len(self.prompt_token_ids)

    def follows(self) -> bool:
        """Whether its leader has yet to compute what they share."""
        if self.leader is None:
            return False
        sequence, num_shared = self.leader
        return sequence.stage is SequenceStage.RUNNING and sequence.num_computed < num_shared

    @property
    def is_decoding(self) -> bool:
        """Whether it decodes here, and only its last token's KV is missing."""
        is_next = self.stage is SequenceStage.RUNNING and self.num_uncomputed == 1
        return is_next and bool(self.output_token_ids) and not self.prefill_only

    @property
    def is_to_be_held(self) -> bool:
        """Whether, with the tokens that it has now, it is not to be run any further."""
        return self.prefill_only or (self.hold_at is not None and len(self.token_ids) >= self.hold_at)

    @property
    def drafted(self) -> list[int]:
        """The tokens beyond the given ones."""
        return self.token_ids[self.num_given :]

    def append(self, token_id: int) -> None:
        self.output_token_ids.append(token_id)
        self.token_ids.append(token_id)

    def give(self, token_ids: Sequence[int]) -> int:
        """Append the tokens that certainly follow the given ones. What was drafted stays where it agrees,
        with its KV; the rest is dropped. Return how many of these tokens were drafted.
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
