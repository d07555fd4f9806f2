"""One request of `/v1/responses`: the earlier conversation, the equivalent chat, and the response."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable

import msgspec
from msgspec import Raw

from protocol.errors import InvalidRequestError
from router.answers.formats import OutputOptions
from router.decoding import decode_body
from router.errors import ApiError
from router.reading.prepared import EarlierResponse, Prepared, PreparedResponse
from router.reading.request_reader import RequestReader
from router.reading.served import ServedModel
from router.responses.answer import Fields, ResponseAnswer
from router.responses.body import Item, ResponseBody
from router.responses.request import converted_chat, echoed_fields, own_field
from router.responses.store import ResponseStore, StoredResponse
from router.text.tokenizer import Tokenizer

_NOTHING_KEPT = (
    "nothing is kept here (--max-stored-responses is 0, or several routers without --response-store)"
)

Read = Callable[[bytes, ServedModel, bytes | None], Awaitable[Prepared | EarlierResponse | bytes]]
"""Calls `read_response` with a body, the model and the items of the earlier response."""


def read_response(
    reader: RequestReader, raw: bytes, model: ServedModel, earlier: bytes | None = None
) -> Prepared | EarlierResponse:
    """Read a body, or return the `EarlierResponse` whose items are needed first. Raises `ApiError` or
    `InvalidRequestError`, which name the request's fields.
    """
    body = decode_body(raw, ResponseBody)
    if body.previous_response_id is not None and earlier is None:
        return EarlierResponse(body.previous_response_id)
    chat, items = converted_chat(body, msgspec.json.decode(earlier or b"[]", type=list[Item]))
    prepared = chat.read(reader.chat_of, model)
    fields = echoed_fields(body, prepared.params)
    echoed = {name: msgspec.json.encode(value) for name, value in fields.items()}
    response = PreparedResponse(echoed, msgspec.json.encode(items), body.store is not False)
    return msgspec.structs.replace(prepared, response=response)


class ResponseTurn:
    """Prepares and answers one request of `owner`. If `store` is None, no responses are kept."""

    def __init__(self, read: Read, store: ResponseStore | None, owner: str) -> None:
        self._read = read
        self._store = store
        self._owner = owner
        self._id = f"resp_{secrets.token_hex(16)}"
        self._items = b""
        """The items of the whole conversation: the earlier ones and the new."""

    async def prepare(self, raw: bytes, model: ServedModel) -> Prepared:
        """Read the request, with the response that it continues. Raises as `read_response`."""
        prepared = await self._read(raw, model, None)
        if isinstance(prepared, EarlierResponse):
            prepared = await self._read(raw, model, await self._earlier(prepared.response_id))
        assert isinstance(prepared, Prepared)
        return prepared

    def renamed(self, error: InvalidRequestError) -> InvalidRequestError:
        """Return an error about the answer's grammar with the request's own field name."""
        return InvalidRequestError(own_field(error.field), error.message)

    def answer(
        self, prepared: Prepared, tokenizer: Tokenizer, model: str, request_id: str, options: OutputOptions
    ) -> ResponseAnswer:
        response = prepared.response
        assert response is not None
        self._items = response.items
        keeps = self._store is not None and response.is_stored
        echoed = {name: Raw(value) for name, value in response.echoed.items()}
        fields = {"model": model, **echoed, "store": keeps}
        return ResponseAnswer(self._id, tokenizer, options, fields, self._keep if keeps else None)

    async def _earlier(self, response_id: str) -> bytes:
        """Return the items of an earlier response."""
        if self._store is None:
            raise InvalidRequestError("previous_response_id", _NOTHING_KEPT)
        found = await asyncio.to_thread(self._store.get, response_id, self._owner)
        if found is None:
            raise ApiError(
                400,
                f"previous_response_id: there is no response {response_id!r}, or no more",
                param="previous_response_id",
                code="previous_response_not_found",
            )
        return found.items

    def _keep(self, response: Fields) -> None:
        assert self._store is not None
        answered = [msgspec.json.encode(item) for item in response["output"]]
        items = b"[%b]" % b",".join([part for part in (self._items[1:-1], *answered) if part])
        self._store.put(StoredResponse(self._id, self._owner, msgspec.json.encode(response), items))
