"""One request of `/v1/responses`: what came before it, the chat that it is, the response that it gets."""

from __future__ import annotations

import secrets

import msgspec

from protocol.errors import InvalidRequestError
from router.decoding import decode_body
from router.errors import ApiError
from router.formats import OutputOptions
from router.registry import ModelFacts
from router.request_builder import Built, RequestBuilder
from router.responses.answer import ResponseAnswer
from router.responses.body import Item, ResponseBody
from router.responses.items import Fields
from router.responses.request import ChatRequest, chat_request, told_back
from router.responses.store import ResponseStore, StoredResponse
from router.tokenizer import Tokenizer

_NOTHING_KEPT = (
    "nothing is kept here (--max-stored-responses is 0, or several routers without --response-store)"
)


class ResponseTurn:
    """`store` None: no responses are kept. Those that are belong to the `owner`."""

    def __init__(self, builder: RequestBuilder, store: ResponseStore | None, owner: str) -> None:
        self._builder = builder
        self._store = store
        self._owner = owner
        self._id = f"resp_{secrets.token_hex(16)}"
        self._body: ResponseBody
        self._chat: ChatRequest

    def build(self, raw: bytes, model: ModelFacts, arrival: float) -> Built:
        """Raises `ApiError` or `InvalidRequestError`, which name the request's fields."""
        self._body = decode_body(raw, ResponseBody)
        self._chat = chat = chat_request(self._body, self._earlier(self._body.previous_response_id))
        try:
            built = self._builder.chat_of(chat.body, model, arrival)
        except (InvalidRequestError, ApiError) as error:
            raise chat.renamed(error) from error
        return built._replace(renamed=chat.renamed)

    def answer(
        self, tokenizer: Tokenizer, model: str, request_id: str, options: OutputOptions
    ) -> ResponseAnswer:
        keeps = self._store is not None and self._body.store is not False
        fields = {"model": model, **told_back(self._body, keeps)}
        return ResponseAnswer(self._id, tokenizer, options, fields, self._keep if keeps else None)

    def _earlier(self, response_id: str | None) -> list[Item]:
        if response_id is None:
            return []
        if self._store is None:
            raise InvalidRequestError("previous_response_id", _NOTHING_KEPT)
        found = self._store.get(response_id, self._owner)
        if found is None:
            raise ApiError(
                400,
                f"previous_response_id: there is no response {response_id!r}, or no more",
                param="previous_response_id",
                code="previous_response_not_found",
            )
        return msgspec.json.decode(found.items, type=list[Item])

    def _keep(self, response: Fields) -> None:
        assert self._store is not None
        items = msgspec.json.encode([*self._chat.items, *response["output"]])
        self._store.put(StoredResponse(self._id, self._owner, msgspec.json.encode(response), items))
