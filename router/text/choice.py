"""One choice of an answer: receives tokens, returns text, stops at stop strings."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import KW_ONLY, InitVar, dataclass, field
from itertools import chain, groupby
from operator import itemgetter

import msgspec

from protocol.kv_events import CacheFormat
from protocol.outputs import PAGE_POSITIONS, TokenLogprobs, TokenOutput, logprobs_pages, paged_logprobs
from protocol.requests import Adapter
from router.text.detokenizer import Detokenizer, StopStringMatcher
from router.workers.kv_index import HashedBlocks, hash_blocks


class Echo(msgspec.Struct, frozen=True):
    """The text of a prompt that the answer begins with, and the offset of each of its tokens in the text."""

    text: str
    offsets: list[int]


class Prompt(msgspec.Struct, frozen=True):
    """A prompt, its `echo` if the answer begins with it, and for drafts a `prediction` of the answer."""

    token_ids: list[int]
    echo: Echo | None = None
    prediction: list[int] = []
    chains: dict[CacheFormat, HashedBlocks] = msgspec.field(default_factory=dict)

    def blocks(self, cache: CacheFormat, cache_salt: str, adapter: Adapter | None) -> HashedBlocks:
        """Return the full blocks in a cache format. They are hashed once: salt and adapter never change."""
        chain = self.chains.get(cache)
        if chain is None:
            root = cache.root(cache_salt, adapter.digest if adapter is not None else "")
            chain = self.chains[cache] = hash_blocks(root, self.token_ids, cache.block_size)
        return chain


class Span(msgspec.Struct, frozen=True):
    """A piece of text with the tokens that complete it, and whether these are accepted draft tokens."""

    text: str
    drafted: bool


class ChoiceDelta(msgspec.Struct):
    """The output since the previous call. `logprobs` come after `pages`; `offsets` ignore stop strings."""

    text: str = ""
    spans: Sequence[Span] = ()
    token_ids: Sequence[int] = ()
    pages: Sequence[bytes] = ()
    logprobs: Sequence[TokenLogprobs] = ()
    offsets: Sequence[int] = ()

    @property
    def is_short(self) -> bool:
        """Whether it is as short as one step's output, which is written quickly."""
        return len(self.token_ids) <= 16 and len(self.text) <= 1024

    def all_logprobs(self) -> Iterator[TokenLogprobs | None]:
        """Iterate over the log-probabilities of all tokens."""
        return chain(paged_logprobs(self.pages), self.logprobs)


@dataclass(eq=False, slots=True)
class Choice:
    """The text of one sequence. `finish_reason` is set once it is complete.

    `stop` strings are ignored within the first `min_tokens` tokens; tokens after one that completes a stop
    string are dropped. The text begins at character `offset`. Of `drafted_tokens` that were verified,
    `accepted_tokens` are part of the answer, and of `predicted_tokens`, drafted from the client's prediction,
    `accepted_predicted`. With `keep_spans` each delta marks the text of accepted draft tokens.
    """

    index: int
    prompt: Prompt
    detokenizer: Detokenizer
    _: KW_ONLY
    stop: InitVar[Sequence[str]] = ()
    include_stop: bool = False
    min_tokens: int = 0
    keep_details: bool = False
    offset: InitVar[int] = 0
    num_tokens: int = 0
    cached_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    predicted_tokens: int = 0
    accepted_predicted: int = 0
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    keep_spans: bool = False
    has_unsent: bool = False
    prompt_logprobs: list[bytes] = field(default_factory=list)
    """Encoded log-probabilities of the prompt, in pages."""
    embedding: bytes | None = None
    """The prompt's embedding, if the request asks for it."""
    _matcher: StopStringMatcher | None = field(init=False)
    _length: int = field(init=False)
    _token_ids: list[int] = field(default_factory=list)
    _logprobs: list[TokenLogprobs] = field(default_factory=list)
    _pages: list[bytes] = field(default_factory=list)
    """Encoded earlier log-probabilities: as objects they would slow the garbage collector down."""
    _offsets: list[int] = field(default_factory=list)
    _pieces: list[str] = field(default_factory=list)
    _drafted: list[bool] = field(default_factory=list)
    """Whether each piece is from an accepted draft token; filled with `keep_spans`."""

    def __post_init__(self, stop: Sequence[str], offset: int) -> None:
        self._matcher = StopStringMatcher(stop, self.include_stop) if stop else None
        self._length = offset

    def push(self, output: TokenOutput) -> None:
        """Append one step's tokens, the accepted drafts first."""
        token_ids: Sequence[int] = output.token_ids
        num_before = self.num_tokens
        if output.cached_tokens is not None and self.num_tokens == 0:
            self.cached_tokens = output.cached_tokens
        ended_by_token = output.finish_reason == "stop" and not self.include_stop
        pieces = self._pieces
        num_pieces = len(pieces)
        for position, token_id in enumerate(token_ids):
            silent = ended_by_token and position == len(token_ids) - 1
            text = "" if silent else self.detokenizer.push(token_id)
            if self.keep_details:
                self._keep(output, position, text)
            self.num_tokens += 1
            pieces.append(text if self._matcher is None else self._matched(text))
            if self.finish_reason is not None:
                break
        if output.drafted_tokens:
            self.drafted_tokens += output.drafted_tokens
            accepted = min(output.accepted_tokens, self.num_tokens - num_before)
            self.accepted_tokens += accepted
            self.predicted_tokens += output.predicted_tokens
            self.accepted_predicted += min(accepted, output.predicted_tokens)
        if output.finish_reason is not None and self.finish_reason is None:
            pieces.append(self._end(output))
        if self.keep_spans:
            num_new = len(pieces) - num_pieces
            self._drafted += [position < output.accepted_tokens for position in range(num_new)]
        if output.prompt_logprobs:
            self.prompt_logprobs.extend(output.prompt_logprobs)
        self.embedding = output.embedding or self.embedding
        self.has_unsent = True

    def fail(self) -> None:
        """End an incomplete choice with the finish reason "error"."""
        if self.finish_reason is None:
            self.push(TokenOutput(request_id="", token_ids=[], finish_reason="error"))

    def take_delta(self) -> ChoiceDelta:
        """Return the output since the previous call."""
        delta = ChoiceDelta()
        if self.keep_spans:
            delta.spans = _spans(self._pieces, self._drafted)
            self._drafted.clear()
        if self.keep_details:
            delta.token_ids, delta.logprobs, delta.offsets = self._token_ids, self._logprobs, self._offsets
            delta.pages = self._pages
            self._token_ids, self._logprobs, self._offsets, self._pages = [], [], [], []
        delta.text = self.take_text()
        return delta

    def take_text(self) -> str:
        """Return only the text since the previous call."""
        text = "".join(self._pieces)
        self._pieces.clear()
        self.has_unsent = False
        return text

    def _keep(self, output: TokenOutput, position: int, text: str) -> None:
        self._token_ids.append(output.token_ids[position])
        self._offsets.append(self._length)
        self._length += len(text)
        if output.logprobs is not None:
            self._logprobs.append(output.logprobs[position])
            if len(self._logprobs) == PAGE_POSITIONS:
                self._pages += logprobs_pages(self._logprobs)
                self._logprobs.clear()

    def _matched(self, text: str) -> str:
        if self._matcher is None or self.num_tokens <= self.min_tokens:
            return text
        text = self._matcher.push(text)
        if self._matcher.matched is not None:
            self.finish_reason, self.stop_reason = "stop", self._matcher.matched
        return text

    def _end(self, output: TokenOutput) -> str:
        text = self._matched(self.detokenizer.flush())
        if self.finish_reason is None:
            self.finish_reason, self.stop_reason = output.finish_reason, output.stop_token_id
            if self._matcher is not None:
                text += self._matcher.flush()
        return text


def _spans(pieces: Sequence[str], drafted: Sequence[bool]) -> list[Span]:
    """Join neighboring pieces of one kind into spans that are not empty."""
    texts = [(is_drafted, text) for is_drafted, text in zip(drafted, pieces, strict=True) if text]
    groups = groupby(texts, key=itemgetter(0))
    return [Span("".join(text for _, text in group), is_drafted) for is_drafted, group in groups]
