"""Which tokens each request's grammar lets come next. llguidance does the grammar work.

The place in a grammar is a function of the request's output: a matcher follows that wherever the request
goes, as the penalties' counts do. Most of what masks cost is to find the tokens of a text that must follow.
So these are found once for each such text, and not looked for where two allowed tokens begin differently.
"""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from queue import SimpleQueue
from typing import NamedTuple

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.hf import from_tokenizer
from transformers import AutoTokenizer

from checkpoints.source import hf_source
from engine.sampler.edits import common_prefix
from engine.sampler.rows import SamplingRow, TokenMasks
from protocol.config import ServeConfig
from protocol.errors import InvalidRequestError

MAX_COMPILED = 256
"""Grammars that are kept for further requests, those used last."""
MAX_PROBLEM = 400
_LIMITS = LLParserLimits(verbose_errors=False)


class Grammars:
    """The grammars of one model's requests. `load_tokenizer` is called once, for the first of them."""

    def __init__(self, load_tokenizer: Callable[[], LLTokenizer]) -> None:
        self._load_tokenizer = load_tokenizer
        self._tokenizer: LLTokenizer | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammar")
        self._compiled: OrderedDict[str, Future[LLMatcher]] = OrderedDict()
        self._matchers: dict[str, Matcher] = {}
        self._mask_thread = MaskThread("masks")
        self._expected: _Expected | None = None
        self._words = np.empty((0, 0), np.int32)
        self._first_bytes = np.empty(0, np.int16)

    def compile(self, grammar: str) -> Future[LLMatcher]:
        """At its start, to be copied; in a thread of its own. It raises `InvalidRequestError`."""
        compiled = self._compiled.get(grammar)
        if compiled is None:
            compiled = self._compiled[grammar] = self._thread.submit(self._compile, grammar)
            if len(self._compiled) > MAX_COMPILED:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(grammar)
        return compiled

    def _compile(self, grammar: str) -> LLMatcher:
        if self._tokenizer is None:
            self._tokenizer = self._load_tokenizer()
            self._first_bytes = _first_bytes(self._tokenizer)
        compiled = LLMatcher(self._tokenizer, grammar, log_level=0, limits=_LIMITS)
        if compiled.is_error():
            raise InvalidRequestError("grammar", compiled.get_error())
        return compiled

    def allows(self, row: SamplingRow, token_ids: Sequence[int]) -> bool:
        """Whether these tokens may follow, of which the last one may be the end."""
        self._mask_thread.wait()
        matcher = self._matcher_of(row)
        assert self._tokenizer is not None
        ends = token_ids[-1] in self._tokenizer.eos_tokens
        output, behind = row.output_token_ids, [*row.drafted, *(token_ids[:-1] if ends else token_ids)]
        is_behind = matcher.follow(output, behind) == len(output) + len(behind)
        return is_behind and (not ends or matcher.may_end())

    def forced(self, row: SamplingRow) -> list[int]:
        """The tokens that must follow: those of a text that the grammar leaves no choice about, as the
        tokenizer writes it.
        """
        self._mask_thread.wait()
        matcher = self._matcher_of(row)
        return matcher.forced() if matcher.is_behind(row) else []

    def problem(self, request_id: str) -> str:
        """Why no token may follow, where that is a bound of llguidance's."""
        matcher = self._matchers.get(request_id)
        return "" if matcher is None else matcher.problem

    def forget(self, request_id: str) -> None:
        self._mask_thread.wait()
        self._matchers.pop(request_id, None)

    def expect(self, rows: Sequence[SamplingRow]) -> None:
        """Begin with the masks of these rows, beside what the caller does until it asks for them, or anything
        else. Some have a grammar.
        """
        self._mask_thread.wait()
        self._mask_thread.begin(partial(self._fill_expected, rows))

    def masks(self, rows: Sequence[SamplingRow]) -> TokenMasks | None:
        """The tokens that the rows may get, until masks are asked for again; None if none has a grammar."""
        self._mask_thread.wait()
        if self._expected is not None and self._expected.keys == [_key(row) for row in rows]:
            return self._expected.masks
        constrained = [number for number, row in enumerate(rows) if row.params.grammar is not None]
        return self._fill(rows, constrained) if constrained else None

    def _fill_expected(self, rows: Sequence[SamplingRow]) -> None:
        constrained = [number for number, row in enumerate(rows) if row.params.grammar is not None]
        masks = self._fill(rows, constrained)
        _ = masks.addresses  # kept there
        self._expected = _Expected(rows, [_key(row) for row in rows], masks)

    def _fill(self, rows: Sequence[SamplingRow], constrained: list[int]) -> TokenMasks:
        self._expected = None
        matchers = [self._matcher_of(rows[number]) for number in constrained]
        count = len(matchers)
        if len(self._words) < count:
            assert self._tokenizer is not None
            self._words = np.empty((2 * count, -(-self._tokenizer.vocab_size // 32)), np.int32)
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
            matcher = self._matchers[row.request_id] = Matcher(start, self._first_bytes)
        return matcher


class _Expected(NamedTuple):
    """Masks that may be asked for. `keys` are no other rows' while these are kept."""

    rows: Sequence[SamplingRow]
    keys: list[tuple[int, ...]]
    masks: TokenMasks


class Matcher:
    """One request's place in its grammar: behind the first tokens of an output, and some `ahead` of those."""

    def __init__(self, start: LLMatcher, first_bytes: np.ndarray) -> None:
        self._start = start
        self._first_bytes = first_bytes
        self._unlike = (0, 0)
        """Two tokens that begin differently, both allowed when that was last looked at; equal: none known."""
        self.problem = ""
        """The reason why llguidance failed."""
        self._begin()

    def _begin(self) -> None:
        self._matcher = self._start.deep_copy()
        self._output: list[int] = []
        self._ahead: list[int] = []
        self._place = 0
        """Tokens before it, those `ahead` among them."""
        self._runs: list[tuple[int, list[int]]] = []
        """The place where a text begins that must follow, and its tokens. They are found once, there: what
        llguidance finds in the middle of it may be other ones.
        """
        self._free_at = -1
        """The last place at which no text was found."""

    def follow(self, output: list[int], behind: Sequence[int] = ()) -> int:
        """Go behind the output, and what is drafted `behind` it, up to the first token that the grammar
        forbids. Returns the tokens before that. Of an output that has grown only what is new is looked at.
        """
        if not behind and not self._ahead and output is self._output:
            if self._place == len(output) - 1:
                self._consume(output[-1])
            if self._place == len(output):
                return self._place
        if output is not self._output:
            self._ahead = [*self._output[: self._place - len(self._ahead)], *self._ahead]
            self._output = output
        start = self._place - len(self._ahead)
        wanted = output[start:]
        wanted += behind
        self._back_to(start + common_prefix(self._ahead, wanted))
        for token in wanted[self._place - start :]:
            if not self._consume(token):
                break
        self._ahead = wanted[len(output) - start : self._place - start]
        return self._place

    def is_behind(self, row: SamplingRow) -> bool:
        """Go behind what precedes the row's token; False if the grammar forbids that."""
        return self.follow(row.output_token_ids, row.drafted) == len(row.output_token_ids) + len(row.drafted)

    def forced(self) -> list[int]:
        """The tokens that must come at this place, if there are such."""
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
        """The bits of what may follow. All, behind a draft that the grammar forbids: it will not be accepted.
        None, where the grammar cannot go on.
        """
        if not self.is_behind(row):
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
        if self._matcher.is_error():  # for good
            words.fill(0)
            self.problem = self._matcher.get_error().partition("\n")[0][:MAX_PROBLEM]
            self._begin()

    @property
    def _is_in_run(self) -> bool:
        """Whether the tokens that must come at this place are known."""
        return bool(self._runs) and self._place < self._runs[-1][0] + len(self._runs[-1][1])

    def _leaves_choice(self, words: np.ndarray) -> bool:
        """Whether two tokens that begin differently are allowed, by a look at the two that were."""
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
    """The masks of the row's place in its grammar, if it has one."""
    if row.params.grammar is None:
        return ()
    return id(row.output_token_ids), len(row.output_token_ids), *row.drafted


def _allow(words: np.ndarray, token: int) -> None:
    """This one alone."""
    words.fill(0)
    words.view(np.uint32)[token >> 5] = 1 << (token & 31)


def _first_bytes(tokenizer: LLTokenizer) -> np.ndarray:
    """int16 [tokens]: the first byte of each one's text; -1 where it has none, as special tokens."""
    found = np.full(tokenizer.vocab_size, -1, np.int16)
    for token in range(tokenizer.vocab_size):
        if not tokenizer.is_special_token(token) and (text := tokenizer.decode_bytes([token])):
            found[token] = text[0]
    return found


Call = Callable[[], object]


class MaskThread:
    """The thread begins with the first call, and ends when nobody has this object any more."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._calls: SimpleQueue[Call | None] | None = None
        self._ends: SimpleQueue[BaseException | None] = SimpleQueue()
        self._is_busy = False

    def begin(self, call: Call) -> None:
        """The one before has ended, as `wait` tells."""
        assert not self._is_busy
        if self._calls is None:
            self._calls = SimpleQueue()
            threading.Thread(
                target=_work, args=(self._calls, self._ends), name=self._name, daemon=True
            ).start()
            weakref.finalize(self, self._calls.put, None)
        self._is_busy = True
        self._calls.put(call)

    def wait(self) -> None:
        """For the end of the call, if one was begun. Raises what it raised."""
        if self._is_busy:
            self._is_busy = False
            error = self._ends.get()
            if error is not None:
                raise error


def _work(calls: SimpleQueue[Call | None], ends: SimpleQueue[BaseException | None]) -> None:
    while (call := calls.get()) is not None:
        try:
            call()
        except BaseException as error:  # the caller's
            ends.put(error)
        else:
            ends.put(None)
        del call


def load_grammar_tokenizer(config: ServeConfig, vocab_size: int, eos_token_ids: Sequence[int]) -> LLTokenizer:
    """Raises `InvalidRequestError`, for the request that needs it."""
    if not eos_token_ids:
        raise InvalidRequestError("grammar", "the model has no end-of-sequence token")
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            hf_source(config.tokenizer_source, config.revision),
            revision=config.revision,
            trust_remote_code=config.trust_remote_code,
        )
        return from_tokenizer(tokenizer, max(vocab_size, len(tokenizer)), list(eos_token_ids))
    except Exception as error:  # of several libraries
        raise InvalidRequestError("grammar", f"not with this model's tokenizer: {error}") from error
