"""The preprocessor's tasks, which map bytes to bytes, their messages, and the reading of bodies."""

from __future__ import annotations

import resource
import struct
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec
import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from protocol.config import ServeConfig
from protocol.errors import InvalidRequestError
from protocol.sampling import MAX_GRAMMAR_BYTES
from router.anthropic.request import MessageBody, count_tokens, read_message
from router.decoding import ignored_fields
from router.errors import ApiError
from router.grammars.structured_outputs import Grammar, GrammarRequest
from router.openai_types import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from router.pooling import (
    EmbeddingBody,
    RerankBody,
    ScoreBody,
    read_embeddings,
    read_ranking,
    read_score,
)
from router.reading.chats import Chats
from router.reading.prepared import EarlierResponse, Prepared, ServedModel
from router.reading.request_reader import RequestReader
from router.responses.body import ResponseBody
from router.responses.request import read_response
from router.text.tokenizer import Tokenizer

MAX_REASON = 400
STACK_BYTES = 1024 * 1024
"""Stack size for compilation: half of the smallest stack of threads in other processes."""


Reading = Prepared | EarlierResponse | bytes
"""Result of reading a body; bytes are a complete answer."""


class BodyKind(NamedTuple):
    """The type of a task's body, its field that takes long to read, and the function that reads it."""

    type: type[msgspec.Struct]
    main_field: str
    read: Callable[..., Reading]


BODIES = {
    "completion": BodyKind(CompletionBody, "prompt", RequestReader.completion),
    "chat": BodyKind(ChatBody, "messages", RequestReader.chat),
    "response": BodyKind(ResponseBody, "input", read_response),
    "message": BodyKind(MessageBody, "messages", read_message),
    "embeddings": BodyKind(EmbeddingBody, "input", read_embeddings),
    "score": BodyKind(ScoreBody, "text_2", read_score),
    "ranking": BodyKind(RerankBody, "documents", read_ranking),
    "count_tokens": BodyKind(MessageBody, "messages", count_tokens),
    "tokenize": BodyKind(TokenizeBody, "prompt", RequestReader.tokenize),
    "detokenize": BodyKind(DetokenizeBody, "tokens", RequestReader.detokenize),
}
for _body, *_ in BODIES.values():
    msgspec.json.Decoder(_body)  # msgspec examines a type at its first use, and crashes if two threads do so
CONVERSIONS = ("count_tokens", "tokenize", "detokenize")
"""Tasks whose reading is a complete answer."""


def read_body(
    reader: RequestReader, task: str, raw: bytes, model: ServedModel, earlier: bytes | None
) -> Reading:
    """Read a body, in any process. Raises `ApiError` or `InvalidRequestError` that names the field."""
    kind = BODIES[task]
    reading = kind.read(reader, raw, model, *([earlier] if task == "response" else []))
    if isinstance(reading, Prepared):
        return msgspec.structs.replace(reading, ignored=ignored_fields(raw, kind.type))
    return reading


class Tasks:
    """All tasks by name. They raise `InvalidRequestError` and `ApiError`."""

    def __init__(self, setup: Setup) -> None:
        self._tokenizer = Tokenizer(setup.tokenizer_json.decode(), setup.tokenizer_settings)
        self._chats = Chats(setup.config, self._tokenizer)
        self._vocabulary: LLTokenizer | None = None
        self._problem = ""
        """Reason why the tokenizer supports no grammar; empty if it does."""
        try:
            self._vocabulary = LLTokenizer(without_merges(setup.tokenizer_json))
        except ValueError as error:
            self._problem = f"not with this model's tokenizer: {error}"
        self._reader = RequestReader(setup.config, self._tokenizer, self._chats)

    def run(self, call: TaskCall, argument: bytes) -> bytes:
        return self._grammar(argument) if call.task == GRAMMAR else self._read(call, argument)

    def _read(self, call: TaskCall, body: bytes) -> bytes:
        details = msgspec.msgpack.decode(call.details, type=ReadingDetails)
        reading = read_body(self._reader, call.task, body, details.model, details.earlier)
        if isinstance(reading, bytes):
            return reading
        if isinstance(reading, Prepared):
            prompts = [prompt.packed() for prompt in reading.prompts]
            reading = msgspec.structs.replace(reading, prompts=prompts)
        return msgspec.msgpack.encode(reading)

    def _grammar(self, argument: bytes) -> bytes:
        """Return the text of the grammar for a `GrammarRequest`, after compiling it once."""
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
        """Return the name (and ": ") of the function whose grammar alone does not compile, or ""."""
        calls = request.calls
        if calls is None or self._vocabulary is None:
            return ""
        for name in [tool.function.name for tool in calls.tools] if calls.name is None else [calls.name]:
            alone = msgspec.structs.replace(request, calls=msgspec.structs.replace(calls, name=name))
            if compile_problem(self._vocabulary, self._chats.grammar(alone)):
                return f"{name}: "
        return ""


def without_merges(tokenizer_json: bytes) -> str:
    """Return the text of a `tokenizer.json` without its merges, which are half of its parsing: they have no
    part in whether a grammar compiles.
    """
    parts = msgspec.json.decode(tokenizer_json, type=dict[str, msgspec.Raw])
    model = msgspec.json.decode(parts["model"], type=dict[str, msgspec.Raw])
    if "merges" in model:
        model["merges"] = msgspec.Raw(b"[]")
    return msgspec.json.encode(parts | {"model": model}).decode()


def compile_problem(vocabulary: LLTokenizer, grammar: Grammar) -> str:
    """Return why the grammar cannot be served; "" if it can.

    It is compiled with less stack than any worker has, so if it can crash a process, it crashes this one.
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


LENGTH = struct.Struct("!Q")
ACCEPTED = b"."
DONE, LEAVING, DIED = b"d", b"l", b"!"
"""States of a child: it accepts another task after the answer, it ends, or a signal has ended it."""
RESULT, REFUSED = b"+", b"-"

GRAMMAR = "grammar"
"""Task that compiles a grammar; all other tasks read bodies."""


class Setup(msgspec.Struct, frozen=True):
    """The preprocessor's configuration and the files of its `Tokenizer`."""

    config: ServeConfig
    tokenizer_json: bytes
    tokenizer_settings: dict[str, Any]


def framed(content: bytes) -> bytes:
    return LENGTH.pack(len(content)) + content


class TaskCall(msgspec.Struct, frozen=True, array_like=True):
    """A task's name, its CPU time limit, and the facts that it needs in addition to its argument."""

    task: str
    cpu_s: float
    details: bytes = b""


class ReadingDetails(msgspec.Struct, frozen=True, array_like=True):
    """The model that serves a body, and the items of the `earlier` response that the body continues."""

    model: ServedModel
    earlier: bytes | None = None


class TaskError(msgspec.Struct, frozen=True, array_like=True):
    """An `InvalidRequestError` if `status` is 0, else an `ApiError`."""

    status: int
    message: str
    param: str | None
    code: str | None = None

    @classmethod
    def from_error(cls, error: InvalidRequestError | ApiError) -> TaskError:
        if isinstance(error, InvalidRequestError):
            return cls(0, error.message, error.field)
        return cls(error.status, error.message, error.param, error.code)

    def to_error(self) -> InvalidRequestError | ApiError:
        if not self.status:
            return InvalidRequestError(self.param or "", self.message)
        return ApiError(self.status, self.message, param=self.param, code=self.code)
