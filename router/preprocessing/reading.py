"""Maps the tasks' names to the functions that read request bodies, for all client endpoints."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import msgspec

from protocol.config import ServeConfig
from router.anthropic.body import MessageBody
from router.anthropic.request import count_tokens, read_message
from router.decoding import ignored_fields
from router.openai_types import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from router.pooling.body import EmbeddingBody, RerankBody, ScoreBody
from router.pooling.requests import read_embeddings, read_ranking, read_score
from router.reading.chats import Chats
from router.reading.prepared import EarlierResponse, Prepared
from router.reading.request_reader import RequestReader
from router.reading.served import ServedModel
from router.responses.body import ResponseBody
from router.responses.turn import read_response
from router.text.tokenizer import Tokenizer

Reading = Prepared | EarlierResponse | bytes
"""Bytes are a complete answer."""


class BodyKind(NamedTuple):
    """A task's body, and its field that takes time to read."""

    type: type[msgspec.Struct]
    main_field: str


BODIES = {
    "completion": BodyKind(CompletionBody, "prompt"),
    "chat": BodyKind(ChatBody, "messages"),
    "response": BodyKind(ResponseBody, "input"),
    "message": BodyKind(MessageBody, "messages"),
    "embeddings": BodyKind(EmbeddingBody, "input"),
    "score": BodyKind(ScoreBody, "text_2"),
    "ranking": BodyKind(RerankBody, "documents"),
    "count_tokens": BodyKind(MessageBody, "messages"),
    "tokenize": BodyKind(TokenizeBody, "prompt"),
    "detokenize": BodyKind(DetokenizeBody, "tokens"),
}
CONVERSIONS = ("count_tokens", "tokenize", "detokenize")
"""The tasks whose reading is the whole answer."""


class BodyReader:
    """Reads bodies, in any process. Raises `ApiError` or `InvalidRequestError`, which name the field."""

    def __init__(self, config: ServeConfig, tokenizer: Tokenizer, chats: Chats) -> None:
        reader = RequestReader(config, tokenizer, chats)
        self._read_response = partial(read_response, reader)
        self._tasks: dict[str, Callable[[bytes, ServedModel], Reading]] = {
            "completion": reader.completion,
            "chat": reader.chat,
            "message": partial(read_message, reader),
            "count_tokens": partial(count_tokens, reader),
            "embeddings": partial(read_embeddings, reader),
            "score": partial(read_score, reader),
            "ranking": partial(read_ranking, reader),
            "tokenize": reader.tokenize,
            "detokenize": reader.detokenize,
        }

    def read(self, task: str, raw: bytes, model: ServedModel, earlier: bytes | None = None) -> Reading:
        if task == "response":
            reading: Reading = self._read_response(raw, model, earlier)
        else:
            reading = self._tasks[task](raw, model)
        if isinstance(reading, Prepared):
            return msgspec.structs.replace(reading, ignored=ignored_fields(raw, BODIES[task].type))
        return reading
