"""Which tokens each request's grammar lets come next. llguidance does the grammar work.

The place in a grammar is a function of the request's output: a matcher follows that wherever the request
goes, as the penalties' counts do.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

import numpy as np
from llguidance import LLMatcher, LLTokenizer

from engine.sampler.masks import TokenMasks
from engine.sampler.penalties import common_prefix
from engine.sampler.rows import SamplingRow
from protocol.errors import InvalidRequestError

MAX_COMPILED = 256
"""Grammars that are kept for further requests, those used last."""


class Grammars:
    """Of the requests of one model. `load_tokenizer` is called once, for the first request with a grammar."""

    def __init__(self, load_tokenizer: Callable[[], LLTokenizer]) -> None:
        self._load_tokenizer = load_tokenizer
        self._tokenizer: LLTokenizer | None = None
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()
        self._matchers: dict[str, Matcher] = {}

    def compile(self, grammar: str) -> LLMatcher:
        """At its start; to be copied. Raises `InvalidRequestError`."""
        compiled = self._compiled.get(grammar)
        if compiled is None:
            if self._tokenizer is None:
                self._tokenizer = self._load_tokenizer()
            compiled = LLMatcher(self._tokenizer, grammar, log_level=0)
            if compiled.is_error():
                raise InvalidRequestError("grammar", compiled.get_error())
            self._compiled[grammar] = compiled
            if len(self._compiled) > MAX_COMPILED:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(grammar)
        return compiled

    def matcher(self, request_id: str, grammar: str) -> Matcher:
        matcher = self._matchers.get(request_id)
        if matcher is None:
            matcher = self._matchers[request_id] = Matcher(self.compile(grammar))
        return matcher

    def allows(self, request_id: str, grammar: str, output_token_ids: Sequence[int]) -> bool:
        return self.matcher(request_id, grammar).follow(output_token_ids)

    def forced(self, request_id: str, grammar: str, output_token_ids: Sequence[int]) -> list[int]:
        """The tokens of the text that must follow this output, as the tokenizer writes it."""
        matcher = self.matcher(request_id, grammar)
        return matcher.forced() if matcher.follow(output_token_ids) else []

    def forget(self, request_id: str) -> None:
        self._matchers.pop(request_id, None)

    def masks(self, rows: Sequence[SamplingRow]) -> TokenMasks | None:
        """What the rows may get; None if none has a grammar."""
        constrained = [row for row, each in enumerate(rows) if each.params.grammar is not None]
        if not constrained:
            return None
        words: np.ndarray | None = None
        for number, row in enumerate(constrained):
            of_row = rows[row]
            assert of_row.params.grammar is not None
            matcher = self.matcher(of_row.request_id, of_row.params.grammar)
            if words is None:
                assert self._tokenizer is not None
                words = np.empty((len(constrained), -(-self._tokenizer.vocab_size // 32)), np.int32)
            matcher.fill(words[number], of_row.output_token_ids)
        assert words is not None
        return TokenMasks(words, constrained, len(rows))


class Matcher:
    """One request's place in its grammar."""

    def __init__(self, start: LLMatcher) -> None:
        self._start = start
        self._matcher = start.deep_copy()
        self._known: list[int] = []

    def follow(self, output_token_ids: Sequence[int]) -> bool:
        """Go behind this output: usually a longer one, after rejected drafts another one. False if the
        grammar forbids it.
        """
        known = self._known
        common = len(known)
        if output_token_ids[:common] != known:
            common = common_prefix(known, output_token_ids)
            self._matcher.rollback(len(known) - common)
            del known[common:]
        new = output_token_ids[common:]
        num_allowed = self._matcher.try_consume_tokens(list(new)) if new else 0
        known += new[:num_allowed]
        return num_allowed == len(new)

    def forced(self) -> list[int]:
        return self._matcher.compute_ff_tokens()

    def fill(self, words: np.ndarray, output_token_ids: Sequence[int]) -> None:
        """The bits of what may follow. All, behind what the grammar forbids: that is a draft, and will not be
        accepted. None, where the grammar cannot go on.
        """
        if not self.follow(output_token_ids):
            words.fill(-1)
            return
        self._matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        if self._matcher.is_error():  # for good
            words.fill(0)
            self._matcher = self._start.deep_copy()
            self._known.clear()
