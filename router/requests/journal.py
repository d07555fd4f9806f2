"""The journal: every live request, with all that is needed to run it on another worker."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import KW_ONLY, InitVar, dataclass, field, replace
from math import inf

import msgspec

from protocol.ids import new_request_id
from protocol.kv_events import CacheFormat
from protocol.outputs import RequestTiming, TokenOutput
from protocol.requests import Adapter, EngineRequest
from protocol.roles import Task
from protocol.sampling import SamplingParams, check_grammar
from protocol.speculation import RequestSpeculation
from router.errors import ApiError
from router.parsing.reasoning import ThinkingBudget
from router.placement.decision import DraftCounts, DraftHistory, PlacementDecision
from router.text.choice import Choice
from router.workers.assignment import Assignment, Stage
from router.workers.kv_index import hash_blocks

NO_KEY = "0"
"""Name of the API key if the server needs none."""


@dataclass(eq=False, slots=True)
class RequestTimes:
    """Times of a request: points in monotonic seconds (0: not reached yet) and durations in seconds.

    A placement begins at `placed_at` and brings its first token at `answered_at`. After a hand-off, the
    decode worker's first token comes at `taken_over_at`. Earlier placements took `earlier_s`. `num_steps`:
    steps that brought tokens after the first.
    """

    parked_at: float = 0.0
    placed_at: float = 0.0
    answered_at: float = 0.0
    taken_over_at: float = 0.0
    ended_at: float = 0.0
    queue_s: float = 0.0
    placement_s: float = 0.0
    earlier_s: float = 0.0
    num_steps: int = 0
    num_placed_again: int = 0
    num_migrated: int = 0

    def start_placement(self) -> None:
        """Start a new placement; the time of the current one counts as `earlier_s`."""
        if self.placed_at:
            self.earlier_s += time.monotonic() - self.placed_at
        self.placed_at = self.answered_at = self.taken_over_at = 0.0

    def park(self) -> None:
        self.parked_at = time.monotonic()

    def unpark(self) -> None:
        self.queue_s += time.monotonic() - self.parked_at


@dataclass(eq=False, slots=True)
class LiveRequest:
    """One sequence: its prompt, the tokens generated so far, and its assignment to workers.

    Workers know it by `request_id`. The journal gives each placement a new one, so that a late token of an
    earlier placement is never taken for a current one. `failed`: incarnations that failed to do their part of
    the request. `failures`: placements lost without a token since a decode worker last sent one.
    """

    generation: Generation
    choice: Choice
    sampling: SamplingParams
    request_id: str = ""
    failures: int = 0
    redirects: int = 0
    failed: set[str] = field(default_factory=set)
    owner: LiveRequest | None = None
    """The request that this is a racing copy of; None: it is no copy."""
    assignment: Assignment | None = None
    """Workers of the latest placement, also after the request has left them."""
    decision: PlacementDecision | None = None
    """The current placement's decision."""
    drafts: DraftHistory = field(default_factory=DraftHistory)
    prefix: str | None = None
    """Id of the worker from which the first worker fetches the leading blocks of the prompt."""
    cost: float = 0.0
    """Charge to the share of its API key: uncached prompt tokens plus expected output, at arrival."""
    output_token_ids: list[int] = field(default_factory=list)
    num_emitted_before: int = 0
    """Number of tokens that earlier placements generated."""
    early: list[TokenOutput] = field(default_factory=list)
    """Outputs of the decode worker that arrived before the prefill worker's token."""
    times: RequestTimes = field(default_factory=RequestTimes)
    timing: RequestTiming = field(default_factory=RequestTiming)
    """Times of the current placement, as its workers report them."""
    first_token_time: float = 0.0
    last_token_time: float = 0.0
    asked_at: float = 0.0
    """Time of the latest question to its worker, for lack of news."""

    @property
    def token_ids(self) -> list[int]:
        """The prompt and the answer so far."""
        return self.choice.prompt.token_ids + self.output_token_ids

    def block_keys(self, cache: CacheFormat) -> list[int]:
        """Return the index keys of the full blocks, including the answer so far, in a cache format."""
        chain = self.choice.prompt.blocks(cache, self.generation.cache_salt, self.generation.adapter)
        if not self.output_token_ids:
            return chain.keys
        rest = self.token_ids[len(chain.keys) * cache.block_size :]
        return chain.keys + hash_blocks(chain.last, rest, cache.block_size).keys

    @property
    def stage(self) -> Stage:
        """The stage of its assignment; `Assignment` has the table of transitions."""
        return Stage.UNPLACED if self.assignment is None else self.assignment.stage

    @property
    def current(self) -> Assignment | None:
        """The assignment to workers that have or will get the request; None if it has no placement."""
        return None if self.stage is Stage.UNPLACED else self.assignment

    @property
    def worker_ids(self) -> dict[Task, str]:
        """Ids of the latest workers by task."""
        return {} if self.assignment is None else self.assignment.worker_ids

    @property
    def num_prefill_tokens(self) -> int:
        """Tokens that the current placement computes before its first token if nothing is cached."""
        return len(self.choice.prompt.token_ids) + self.num_emitted_before

    @property
    def draft_counts(self) -> DraftCounts:
        choice, num_tokens = self.choice, len(self.output_token_ids)
        return DraftCounts(
            self.times.num_steps, max(num_tokens - 1, 0), choice.drafted_tokens, choice.accepted_tokens
        )

    def complaint(self, output: TokenOutput) -> str | None:
        """Return the reason why a worker's output is invalid beyond what its type checks, or None."""
        num_tokens = len(output.token_ids)
        if len(self.output_token_ids) + num_tokens > self.sampling.max_tokens:
            return "sent more tokens than were asked for"
        drafted = max(output.accepted_tokens, output.predicted_tokens)
        if output.accepted_tokens > num_tokens or drafted > output.drafted_tokens:
            return "counted more tokens as accepted or predicted than it drafted or sent"
        if output.logprobs is None:
            missing = num_tokens > 0 and self.sampling.logprobs is not None
        else:
            missing = len(output.logprobs) != num_tokens
        return "sent no log-probabilities for some tokens" if missing else None

    def past_budget(self, output: TokenOutput) -> TokenOutput | None:
        """Return the output to use instead of this one if it exceeds the thinking budget, else None."""
        thinking = self.generation.thinking
        if thinking is None:
            return None
        return thinking.exceeded(self.output_token_ids, output, self.sampling.max_tokens)

    def start_placement(self) -> None:
        """Prepare for a placement on other workers, with the tokens so far."""
        self.num_emitted_before = len(self.output_token_ids)
        self.times.start_placement()
        self.timing = RequestTiming()
        self.early.clear()

    def copy(self) -> LiveRequest:
        """Return a racing copy: it has its own placement, and the same tokens and answer."""
        times = replace(self.times)
        return replace(self, owner=self, request_id="", times=times, drafts=DraftHistory(), early=[])

    def note(self, timing: RequestTiming) -> None:
        """Merge reported times: first the prefill worker's own, later the hand-off's of the decode worker."""
        if timing.transfer is not None:
            timing = msgspec.structs.replace(
                self.timing, transfer=timing.transfer, decode_queue_s=timing.decode_queue_s
            )
        self.timing = timing

    @property
    def last_message_at(self) -> float:
        """Time of the newest token, or of the current placement if that is later."""
        return max(self.times.placed_at, self.last_token_time)

    def end(self, eos_token_ids: Sequence[int]) -> TokenOutput | None:
        """Return the output that ends the request if its tokens so far complete it, else None."""
        tokens = self.output_token_ids
        if not tokens:
            return None
        reason, stop_token_id = self.sampling.end(tokens[-1], len(tokens), eos_token_ids)
        if reason is None:
            return None
        return TokenOutput(
            request_id=self.request_id, token_ids=[], finish_reason=reason, stop_token_id=stop_token_id
        )

    def engine_request(self, timeout_s: float) -> EngineRequest:
        sampling = self.sampling
        if self.choice.prompt_logprobs:
            sampling = msgspec.structs.replace(sampling, prompt_logprobs=None)
        return EngineRequest(
            request_id=self.request_id,
            prompt_token_ids=self.choice.prompt.token_ids,
            sampling=sampling,
            output_token_ids=self.output_token_ids,
            priority=self.generation.priority,
            timeout_s=timeout_s,
            slo_tpot_s=self.generation.slo_tpot_s,
            cache_salt=self.generation.cache_salt,
            adapter=self.generation.adapter,
            speculation=self.generation.speculation,
            prediction=self.choice.prompt.prediction,
            draft_plan=self.drafts.plan,
        )


@dataclass(eq=False)
class Generation:
    """All sequences of one HTTP request, and the handler that waits for their tokens."""

    sequences: InitVar[Sequence[tuple[Choice, SamplingParams]]]
    _: KW_ONLY
    arrival: float
    timeout_s: InitVar[float]
    priority: int = 0
    cache_salt: str = ""
    adapter: Adapter | None = None
    speculation: RequestSpeculation | None = None
    session: str = ""
    split: bool | None = None
    thinking: ThinkingBudget | None = None
    http_id: str = ""
    """Id of the HTTP request."""
    key: str = NO_KEY
    """Name of the API key that the request came with."""
    client: str = ""
    """Address of the client if the server needs no key."""
    slo_ttft_s: float = inf
    slo_tpot_s: float = inf
    """SLOs that the client asks for."""
    error: ApiError | None = None
    timeout: asyncio.TimerHandle | None = None
    _has_news: bool = False
    _waiter: asyncio.Future[None] | None = None
    _write: Callable[[], bool] | None = None

    def __post_init__(self, sequences: Sequence[tuple[Choice, SamplingParams]], timeout_s: float) -> None:
        self.started, self.deadline = self.arrival, self.arrival + timeout_s
        self.requests = [LiveRequest(self, choice, sampling) for choice, sampling in sequences]
        self.choices = [choice for choice, _ in sequences]
        self.num_unfinished = len(self.requests)

    def constrain(self, grammar: str) -> None:
        """Constrain every answer to the grammar. Raises `InvalidRequestError`."""
        for request in self.requests:
            request.sampling = msgspec.structs.replace(request.sampling, grammar=grammar)
            check_grammar(request.sampling)

    @property
    def is_over(self) -> bool:
        return self.num_unfinished == 0 or self.error is not None

    @property
    def turn(self) -> str:
        """The party that takes turns with others: the API key or, without keys, the client's address."""
        return self.client or self.key

    @property
    def has_answered(self) -> bool:
        """Whether a token of any sequence has come."""
        return any(request.output_token_ids for request in self.requests)

    def notify(self) -> None:
        """Tell the handler of new output, unless the output can be written at once."""
        if self._has_news:
            return
        if self._write is not None and self._write():
            return
        self._has_news = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def wait(self, write: Callable[[], bool] | None = None) -> None:
        """Wait for output since the last call that `write` has not written already.

        There is one handler, so one future is enough.
        """
        if not self._has_news:
            self._waiter, self._write = asyncio.get_running_loop().create_future(), write
            try:
                await self._waiter
            finally:
                self._waiter = self._write = None
        self._has_news = False


class Journal:
    """Live requests by the ids that the workers know. `router` is the router's incarnation."""

    def __init__(self, router: str) -> None:
        self._router = router
        self._requests: dict[str, LiveRequest] = {}
        self.copies: dict[LiveRequest, LiveRequest] = {}
        """The copy of each racing request. Copies are in the journal too, but not in its length."""

    def __len__(self) -> int:
        return len(self._requests) - len(self.copies)

    def __iter__(self) -> Iterator[LiveRequest]:
        return iter(list(self._requests.values()))

    def add(self, request: LiveRequest) -> None:
        """Add a request with a new id."""
        request.request_id = new_request_id(self._router)
        self._requests[request.request_id] = request

    def get(self, request_id: str) -> LiveRequest | None:
        return self._requests.get(request_id)

    def remove(self, request: LiveRequest) -> bool:
        """Remove a request or a copy. Return False if it was not in the journal."""
        if request.owner is not None:
            self.copies.pop(request.owner, None)
        return self._requests.pop(request.request_id, None) is not None

    def assigned(self) -> list[tuple[LiveRequest, Assignment]]:
        """Return the requests that are assigned to workers."""
        return [(request, at) for request in self._requests.values() if (at := request.current) is not None]

    def less_urgent(self, priority: int) -> list[Generation]:
        """Return the less urgent generations without a token, the least urgent first, then the youngest."""
        others = {each.generation: None for each in self if each.generation.priority > priority}
        waiting = [generation for generation in others if not generation.has_answered]
        return sorted(waiting, key=lambda each: (-each.priority, -each.arrival))
