"""The preprocessor's tasks: each turns bytes into bytes."""

from __future__ import annotations

import resource

import msgspec
import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from protocol.errors import InvalidRequestError
from protocol.sampling import MAX_GRAMMAR_BYTES
from router.grammars.grammar_request import GrammarRequest
from router.grammars.structured_outputs import Grammar
from router.preprocessing.reading import BodyReader
from router.preprocessing.wire import GRAMMAR, ReadingDetails, Setup, TaskCall
from router.reading.chats import Chats
from router.reading.prepared import Prepared
from router.text.tokenizer import Tokenizer

MAX_REASON = 400
STACK_BYTES = 1024 * 1024
"""Half of the smallest stack that threads of other processes have."""


class Tasks:
    """All tasks by their names. They raise `InvalidRequestError` and `ApiError`."""

    def __init__(self, setup: Setup) -> None:
        self._tokenizer = Tokenizer(setup.tokenizer_json, setup.tokenizer_settings)
        self._chats = Chats(setup.config, self._tokenizer)
        self._vocabulary: LLTokenizer | None = None
        self._problem = ""
        """The reason why the tokenizer supports no grammar."""
        try:
            self._vocabulary = LLTokenizer(self._tokenizer.as_json())
        except ValueError as error:
            self._problem = f"not with this model's tokenizer: {error}"
        self._reader = BodyReader(setup.config, self._tokenizer, self._chats)

    def run(self, call: TaskCall, argument: bytes) -> bytes:
        return self._grammar(argument) if call.task == GRAMMAR else self._read(call, argument)

    def _read(self, call: TaskCall, body: bytes) -> bytes:
        details = msgspec.msgpack.decode(call.details, type=ReadingDetails)
        reading = self._reader.read(call.task, body, details.model, details.earlier)
        if isinstance(reading, bytes):
            return reading
        if isinstance(reading, Prepared):
            prompts = [prompt.packed() for prompt in reading.prompts]
            reading = msgspec.structs.replace(reading, prompts=prompts)
        return msgspec.msgpack.encode(reading)

    def _grammar(self, argument: bytes) -> bytes:
        """Return the text of the grammar that a `GrammarRequest` asks for, after compiling it once."""
        request = msgspec.json.decode(argument, type=GrammarRequest)
        grammar = self._chats.grammar(request)
        text = grammar.text.encode()
        if len(text) > MAX_GRAMMAR_BYTES:
            reason = f"at most {MAX_GRAMMAR_BYTES} bytes as llguidance reads it, got {len(text)}"
            raise InvalidRequestError(grammar.field, reason)
        problem = self._problem if self._vocabulary is None else compile_problem(self._vocabulary, grammar)
        if problem:
            raise InvalidRequestError(grammar.field, f"{self._culprit(request)}{problem}"[:MAX_REASON])
        return text

    def _culprit(self, request: GrammarRequest) -> str:
        """Return the name of the function whose grammar alone does not compile, if there is one."""
        calls = request.calls
        if calls is None or self._vocabulary is None:
            return ""
        for name in [tool.function.name for tool in calls.tools] if calls.name is None else [calls.name]:
            alone = msgspec.structs.replace(request, calls=msgspec.structs.replace(calls, name=name))
            if compile_problem(self._vocabulary, self._chats.grammar(alone)):
                return f"{name}: "
        return ""


def compile_problem(vocabulary: LLTokenizer, grammar: Grammar) -> str:
    """Return the reason why the grammar cannot be served; empty if it can.

    It is compiled with less stack than any worker has, so a crash happens here or nowhere.
    """
    stack, most = resource.getrlimit(resource.RLIMIT_STACK)
    resource.setrlimit(resource.RLIMIT_STACK, (STACK_BYTES, most))
    matcher = LLMatcher(vocabulary, grammar.text, log_level=0, limits=LLParserLimits(verbose_errors=False))
    resource.setrlimit(resource.RLIMIT_STACK, (stack, most))
    if not matcher.is_error():
        first = np.empty(-(-vocabulary.vocab_size // 32), np.int32)
        matcher.unsafe_compute_mask_ptr(first.ctypes.data, first.nbytes)
        if matcher.is_error():
            return "no text satisfies it, or it is too complex"
    return matcher.get_error().strip()
