"""Maps the tasks' names to the functions that read request bodies, for all client endpoints."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from protocol.config import ServeConfig
from router.anthropic.request import count_tokens, read_message
from router.chats import Chats
from router.pooling.requests import read_embeddings, read_ranking, read_score
from router.prepared import EarlierResponse, Prepared
from router.request_reader import RequestReader
from router.responses.turn import read_response
from router.served import ServedModel
from router.tokenizer import Tokenizer

Reading = Prepared | EarlierResponse | bytes
"""Bytes are a complete answer."""

MAIN_FIELDS = {
    "completion": "prompt",
    "chat": "messages",
    "response": "input",
    "message": "messages",
    "embeddings": "input",
    "score": "text_2",
    "ranking": "documents",
    "count_tokens": "messages",
    "tokenize": "prompt",
    "detokenize": "tokens",
}
"""The field of each task's body that takes time to read."""

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
            return self._read_response(raw, model, earlier)
        return self._tasks[task](raw, model)
