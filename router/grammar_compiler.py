"""Tells whether a grammar can be served, before a worker gets it."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from hashlib import blake2b

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from protocol.errors import InvalidRequestError
from router.structured_outputs import Grammar
from router.tokenizer import Tokenizer

COMPILE_TIMEOUT_S = 2.0
MAX_KNOWN = 4096
"""Grammars whose verdict is kept, those used last: a hash and a line of text each."""
MAX_REASON = 400


class GrammarCompiler:
    """Compiles each grammar once, in a thread of its own. llguidance bounds the work by its own limits."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._source = tokenizer
        self._tokenizer: LLTokenizer | None = None
        self._problems: OrderedDict[bytes, str] = OrderedDict()
        self._threads = ThreadPoolExecutor(max_workers=2, thread_name_prefix="grammar")

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def check(self, grammar: Grammar) -> None:
        """Raises `InvalidRequestError`, within `COMPILE_TIMEOUT_S` and what loading the vocabulary takes."""
        key = blake2b(grammar.text.encode(), digest_size=16).digest()
        problem = self._problems.get(key)
        if problem is None:
            problem = await self._compiled(grammar)
            self._problems[key] = problem
            if len(self._problems) > MAX_KNOWN:
                self._problems.popitem(last=False)
        self._problems.move_to_end(key)
        if problem:
            raise InvalidRequestError(grammar.field, problem)

    async def _compiled(self, grammar: Grammar) -> str:
        loop = asyncio.get_running_loop()
        if self._tokenizer is None:
            self._tokenizer = await loop.run_in_executor(self._threads, self._load, grammar.field)
        compiling = loop.run_in_executor(self._threads, _problem, self._tokenizer, grammar.text)
        try:
            return await asyncio.wait_for(compiling, COMPILE_TIMEOUT_S)
        except TimeoutError:
            reason = f"it cannot be compiled within {COMPILE_TIMEOUT_S:g} s"
            raise InvalidRequestError(grammar.field, reason) from None

    def _load(self, field: str) -> LLTokenizer:
        try:
            return LLTokenizer(self._source.as_json())
        except ValueError as error:
            raise InvalidRequestError(field, f"not with this model's tokenizer: {error}") from error


def _problem(tokenizer: LLTokenizer, grammar: str) -> str:
    """What is wrong with the grammar; "": nothing."""
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=LLParserLimits(verbose_errors=False))
    if not matcher.is_error():
        first = np.empty(-(-tokenizer.vocab_size // 32), np.int32)
        matcher.unsafe_compute_mask_ptr(first.ctypes.data, first.nbytes)
        if matcher.is_error():
            return "no text satisfies it, or it is too complex"
    return matcher.get_error().strip()[:MAX_REASON]
