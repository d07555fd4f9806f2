"""The tokens that each request's grammar allows next. llguidance does the grammar work.

The place in a grammar is a function of the request's output: a matcher follows the output, also back after
rejected drafts, like the penalties' counts. The most expensive part of a mask is the search for forced
tokens, a text that must follow. It is done once per text, and only if all allowed tokens begin alike.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from checkpoints.tokenizer import TokenizerSource, load_files, whole_tokenizer
from engine.sampler.edits import common_prefix
from engine.sampler.rows import SamplingRow, TokenMasks
from protocol.config import ServeConfig
from protocol.errors import InvalidRequestError

MAX_COMPILED = 256
"""Number of compiled grammars that are kept for later requests, the most recently used ones."""
MAX_PROBLEM = 400
_LIMITS = LLParserLimits(verbose_errors=False)


class Grammars:
    """The grammars of one model's requests. `load` is called once, for the first grammar."""

    def __init__(self, load: Callable[[], Vocabulary]) -> None:
        self._load = load
        self._vocabulary: Vocabulary | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammar")
        self.compile = lru_cache(MAX_COMPILED)(self._begin_compile)
        self._matchers: dict[str, Matcher] = {}
        self._mask_thread = ThreadPoolExecutor(1, thread_name_prefix="masks")
        self._filling: Future[None] | None = None
        """The call in the mask thread, until `wait`."""
        self._expected: _Expected | None = None
        self._words = np.empty((0, 0), np.int32)

    def prepare(self) -> None:
        """Load the vocabulary before the first request needs it: that can keep all threads from Python for
        seconds, heartbeats included. A failure is told to each request with a grammar.
        """
        with suppress(InvalidRequestError):
            self._thread.submit(self._loaded).result()

    def _begin_compile(self, grammar: str) -> Future[LLMatcher]:
        """Compile a grammar in a separate thread. The future has a matcher at the grammar's start, to be
        copied, or raises `InvalidRequestError`."""
        return self._thread.submit(self._compile, grammar)

    def _compile(self, grammar: str) -> LLMatcher:
        compiled = LLMatcher(self._loaded().tokenizer, grammar, log_level=0, limits=_LIMITS)
        if compiled.is_error():
            raise InvalidRequestError("grammar", compiled.get_error())
        return compiled

    def _loaded(self) -> Vocabulary:
        if self._vocabulary is None:
            self._vocabulary = self._load()
        return self._vocabulary

    def allows(self, row: SamplingRow, token_ids: Sequence[int]) -> bool:
        """Return whether these tokens may follow the row. The last one may be an end token."""
        self.wait()
        matcher = self._matcher_of(row)
        assert self._vocabulary is not None
        ends = token_ids[-1] in self._vocabulary.tokenizer.eos_tokens
        output, drafted = row.output_token_ids, [*row.drafted, *(token_ids[:-1] if ends else token_ids)]
        is_allowed = matcher.follow(output, drafted) == len(output) + len(drafted)
        return is_allowed and (not ends or matcher.may_end())

    def forced(self, row: SamplingRow) -> list[int]:
        """Return the tokens that must follow the row: the text that the grammar forces, as the tokenizer
        writes it.
        """
        self.wait()
        matcher = self._matcher_of(row)
        return matcher.forced() if matcher.follow_row(row) else []

    def problem(self, request_id: str) -> str:
        """Return llguidance's error if no token may follow because one of its limits was reached."""
        matcher = self._matchers.get(request_id)
        return "" if matcher is None else matcher.problem

    def forget(self, request_id: str) -> None:
        self.wait()
        self._matchers.pop(request_id, None)

    def expect(self, rows: Sequence[SamplingRow]) -> None:
        """Begin to compute the masks of these rows in the mask thread; `masks`, like the other methods, waits
        for them. At least one row has a grammar.
        """
        self.wait()
        self._filling = self._mask_thread.submit(self._fill_expected, rows)

    def wait(self) -> None:
        """Wait until no masks are being computed in the mask thread. Raise its error."""
        filling, self._filling = self._filling, None
        if filling is not None:
            filling.result()

    def masks(self, rows: Sequence[SamplingRow]) -> TokenMasks | None:
        """Return the tokens that the rows may get, valid until the next call; None without grammars."""
        self.wait()
        if self._expected is not None and self._expected.keys == [_key(row) for row in rows]:
            return self._expected.masks
        constrained = [number for number, row in enumerate(rows) if row.params.grammar is not None]
        return self._fill(rows, constrained) if constrained else None

    def _fill_expected(self, rows: Sequence[SamplingRow]) -> None:
        constrained = [number for number, row in enumerate(rows) if row.params.grammar is not None]
        masks = self._fill(rows, constrained)
        _ = masks.addresses  # computed here and cached in the object
        self._expected = _Expected(rows, [_key(row) for row in rows], masks)

    def _fill(self, rows: Sequence[SamplingRow], constrained: list[int]) -> TokenMasks:
        self._expected = None
        matchers = [self._matcher_of(rows[number]) for number in constrained]
        count = len(matchers)
        if len(self._words) < count:
            assert self._vocabulary is not None
            self._words = np.empty((2 * count, -(-self._vocabulary.tokenizer.vocab_size // 32)), np.int32)
        words = self._words[:count]
        address, stride = words.ctypes.data, words.strides[0]
        for place, matcher in enumerate(matchers):
            matcher.fill(words[place], address + place * stride, rows[constrained[place]])
        return TokenMasks(words, constrained, len(rows))

    def _matcher_of(self, row: SamplingRow) -> Matcher:
        matcher = self._matchers.get(row.request_id)
        if matcher is None:
            assert row.params.grammar is not None
            start = self.compile(row.params.grammar).result()
            matcher = self._matchers[row.request_id] = Matcher(start, self._loaded().first_bytes)
        return matcher


class _Expected(NamedTuple):
    """Masks that the next `masks` may return. While `rows` are kept, no other rows have the same `keys`."""

    rows: Sequence[SamplingRow]
    keys: list[tuple[int, ...]]
    masks: TokenMasks


class Matcher:
    """One request's place in its grammar: after a prefix of the output, or after draft tokens `_ahead`."""

    def __init__(self, start: LLMatcher, first_bytes: np.ndarray) -> None:
        self._start = start
        self._first_bytes = first_bytes
        self._unlike = (0, 0)
        """Two tokens that begin differently, both allowed by an earlier mask; equal: none are known."""
        self.problem = ""
        """The error with which llguidance failed."""
        self._begin()

    def _begin(self) -> None:
        self._matcher = self._start.deep_copy()
        self._output: list[int] = []
        self._ahead: list[int] = []
        self._place = 0
        """Number of consumed tokens, including `_ahead`."""
        self._runs: list[tuple[int, list[int]]] = []
        """Forced texts: the place where each begins, and its tokens. They are found once, at the beginning:
        in the middle of a text llguidance may find other tokens.
        """
        self._free_at = -1
        """The last place at which no text was forced."""

    def follow(self, output: list[int], drafted: Sequence[int] = ()) -> int:
        """Advance the matcher past the output and the tokens in `drafted`, up to the first forbidden one.
        Return the number of tokens before it. Tokens that were consumed earlier are not read again.
        """
        if not drafted and not self._ahead and output is self._output:
            if self._place == len(output) - 1:
                self._consume(output[-1])
            if self._place == len(output):
                return self._place
        if output is not self._output:
            self._ahead = [*self._output[: self._place - len(self._ahead)], *self._ahead]
            self._output = output
        start = self._place - len(self._ahead)
        wanted = output[start:]
        wanted += drafted
        self._back_to(start + common_prefix(self._ahead, wanted))
        for token in wanted[self._place - start :]:
            if not self._consume(token):
                break
        self._ahead = wanted[len(output) - start : self._place - start]
        return self._place

    def follow_row(self, row: SamplingRow) -> bool:
        """Advance the matcher to the row's token; return whether the grammar allows the tokens before it."""
        return self.follow(row.output_token_ids, row.drafted) == len(row.output_token_ids) + len(row.drafted)

    def forced(self) -> list[int]:
        """Return the tokens that are forced at this place; [] if there is a choice."""
        if self._runs:
            start, tokens = self._runs[-1]
            if self._place < start + len(tokens):
                return tokens[self._place - start :]
        if self._free_at == self._place:
            return []
        tokens = self._matcher.compute_ff_tokens()
        if tokens:
            self._runs.append((self._place, tokens))
        else:
            self._free_at = self._place
        return tokens

    def may_end(self) -> bool:
        return not self.forced() and self._matcher.is_accepting()

    def fill(self, words: np.ndarray, address: int, row: SamplingRow) -> None:
        """Set the bits of the tokens that the row may get: all bits after a forbidden draft, which will not
        be accepted; no bits if the grammar cannot continue.
        """
        if not self.follow_row(row):
            words.fill(-1 if self._place >= len(row.output_token_ids) else 0)
        elif self._is_in_run and (tokens := self.forced()):
            _allow(words, tokens[0])
        else:
            self._matcher.unsafe_compute_mask_ptr(address, words.nbytes)
            if self._free_at != self._place and not self._leaves_choice(words):
                if tokens := self.forced():
                    _allow(words, tokens[0])
                else:
                    self._unlike = self._two_unlike(words)
        if self._matcher.is_error():  # permanently
            words.fill(0)
            self.problem = self._matcher.get_error().partition("\n")[0][:MAX_PROBLEM]
            self._begin()

    @property
    def _is_in_run(self) -> bool:
        """Whether the tokens that are forced at this place are known."""
        return bool(self._runs) and self._place < self._runs[-1][0] + len(self._runs[-1][1])

    def _leaves_choice(self, words: np.ndarray) -> bool:
        """Return whether the two known tokens that begin differently are still allowed."""
        one, other = self._unlike
        if one == other or not (words[one >> 5] >> (one & 31) & words[other >> 5] >> (other & 31) & 1):
            return False
        self._free_at = self._place
        return True

    def _two_unlike(self, words: np.ndarray) -> tuple[int, int]:
        bits = np.unpackbits(words.view(np.uint8), count=len(self._first_bytes), bitorder="little")
        allowed = np.flatnonzero(bits & (self._first_bytes >= 0))
        first = self._first_bytes[allowed]
        others = allowed[first != first[:1]]
        return (int(allowed[0]), int(others[0])) if len(others) else (0, 0)

    def _consume(self, token: int) -> bool:
        forced = self.forced()
        if (forced and forced[0] != token) or not self._matcher.try_consume_tokens([token]):
            return False
        self._place += 1
        return True

    def _back_to(self, place: int) -> None:
        if place == self._place:
            return
        self._matcher.rollback(self._place - place)
        self._place, self._free_at = place, -1
        while self._runs and self._runs[-1][0] > place:
            self._runs.pop()


def _key(row: SamplingRow) -> tuple[int, ...]:
    """Return a key of the row's mask: its place in the grammar; () without a grammar."""
    if row.params.grammar is None:
        return ()
    return id(row.output_token_ids), len(row.output_token_ids), *row.drafted


def _allow(words: np.ndarray, token: int) -> None:
    words.fill(0)
    words.view(np.uint32)[token >> 5] = 1 << (token & 31)


class Vocabulary(NamedTuple):
    """llguidance's tokenizer, and the first byte of each token's text, int16 [tokens]; -1 for special and
    empty tokens.
    """

    tokenizer: LLTokenizer
    first_bytes: np.ndarray

    @classmethod
    def of(cls, tokenizer: LLTokenizer) -> Vocabulary:
        found = np.full(tokenizer.vocab_size, -1, np.int16)
        for token in range(tokenizer.vocab_size):
            if not tokenizer.is_special_token(token) and (text := tokenizer.decode_bytes([token])):
                found[token] = text[0]
        return cls(tokenizer, found)


def load_vocabulary(config: ServeConfig, vocab_size: int, eos_token_ids: Sequence[int]) -> Vocabulary:
    """Load the vocabulary of the model, or of its draft. Raises `InvalidRequestError`, for grammars.

    A process loads it once; processes that are forked from it share it.
    """
    if not eos_token_ids:
        raise InvalidRequestError("grammar", "the model has no end-of-sequence token")
    try:
        return _load_vocabulary(TokenizerSource.of(config), vocab_size, tuple(eos_token_ids))
    except Exception as error:  # several libraries raise errors of their own
        raise InvalidRequestError("grammar", f"not with this model's tokenizer: {error}") from error


@lru_cache(2)
def _load_vocabulary(source: TokenizerSource, vocab_size: int, eos_token_ids: tuple[int, ...]) -> Vocabulary:
    text, end_tokens = whole_tokenizer(*load_files(source)), [*eos_token_ids]
    try:
        tokenizer = LLTokenizer(text, n_vocab=vocab_size, eos_token=end_tokens)
    except ValueError:  # the tokenizer may have more tokens than the model
        tokenizer = LLTokenizer(text, eos_token=end_tokens)
    return Vocabulary.of(tokenizer)
