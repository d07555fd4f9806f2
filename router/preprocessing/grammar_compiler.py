"""Has the preprocessor compile grammars before workers get them, and remembers the outcomes."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections import OrderedDict
from collections.abc import Iterable
from hashlib import blake2b

from protocol.errors import InvalidRequestError
from router.errors import ApiError
from router.grammars.grammar_request import AskedGrammar
from router.preprocessing.client import CpuLimitError, CrashError, Preprocessor
from router.preprocessing.wire import GRAMMAR, TaskCall

logger = logging.getLogger(__name__)

COMPILE_CPU_S = 2.0
"""The limit of CPU time from a request's fields to a grammar that has been compiled once."""
MAX_KNOWN_BYTES = 64 * 1024 * 1024
"""The most bytes of remembered grammars and errors; the least recently used are dropped."""

ENTRY_BYTES = 256
"""Approximate bytes of an entry in addition to its text."""

RETRY_S = 1.0

Outcome = str | InvalidRequestError


class GrammarCompiler:
    """Compiles requested grammars, each only once. A grammar that reaches the CPU limit is not remembered."""

    def __init__(self, preprocessor: Preprocessor) -> None:
        self._preprocessor = preprocessor
        self._prepared: dict[bytes, Outcome] = {}
        self._known: OrderedDict[bytes, Outcome] = OrderedDict()
        self._known_bytes = 0

    async def prepare(self, grammars: Iterable[AskedGrammar]) -> None:
        """Compile grammars that are always remembered, so that requests for them never wait."""
        for asked in grammars:
            while (key := _key(asked)) not in self._prepared:
                try:
                    self._prepared[key] = await self._compile(asked)
                except (ApiError, InvalidRequestError) as error:
                    logger.warning("the grammar of %s is not compiled yet: %s", asked.field, error)
                    await asyncio.sleep(RETRY_S)

    async def compile(self, asked: AskedGrammar) -> str:
        """Return the grammar as llguidance reads it.

        Raises `InvalidRequestError`, and `ApiError` 503 if the server is too busy to decide.
        """
        key = _key(asked)
        outcome = self._prepared.get(key) or self._known.get(key)
        if outcome is None:
            outcome = await self._compile(asked)
            self._remember(key, outcome)
        if key in self._known:
            self._known.move_to_end(key)
        if isinstance(outcome, InvalidRequestError):
            raise InvalidRequestError(outcome.field, outcome.message)
        return outcome

    async def _compile(self, asked: AskedGrammar) -> Outcome:
        try:
            call = TaskCall(GRAMMAR, COMPILE_CPU_S)
            return (await self._preprocessor.run(call, asked.request)).decode()
        except CpuLimitError:
            reason = f"it takes more than {COMPILE_CPU_S:g} s of CPU time to compile, the limit"
            raise InvalidRequestError(asked.field, reason) from None
        except CrashError as error:
            reason = f"the compiler crashes on it ({error}), as on rules that are nested too deeply"
            return InvalidRequestError(asked.field, reason)
        except InvalidRequestError as error:
            return error

    def _remember(self, key: bytes, outcome: Outcome) -> None:
        if key not in self._known:
            self._known[key] = outcome
            self._known_bytes += _size(outcome)
        while self._known_bytes > MAX_KNOWN_BYTES:
            _, oldest = self._known.popitem(last=False)
            self._known_bytes -= _size(oldest)


def _key(asked: AskedGrammar) -> bytes:
    return blake2b(asked.request, digest_size=16).digest()


def _size(outcome: Outcome) -> int:
    return sys.getsizeof(outcome if isinstance(outcome, str) else outcome.message) + ENTRY_BYTES
