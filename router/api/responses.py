"""Endpoints of `/v1/responses`: generate a response, get it again, delete it."""

from __future__ import annotations

import asyncio

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Scope

from protocol.errors import InvalidRequestError
from router.api.generate import GenerateEndpoint
from router.api.openapi import Operation
from router.api_keys import Admission
from router.errors import ApiError
from router.middleware import ADMISSION
from router.responses.body import ResponseBody
from router.responses.turn import ResponseTurn
from router.state import RouterState


def response_operations(state: RouterState) -> list[Operation]:
    store = state.responses

    def begin(scope: Scope) -> ResponseTurn:
        return ResponseTurn(state.requests.prepare_response, store, _owner(scope))

    async def look(request: Request) -> Response:
        response_id = request.path_params["response_id"]
        if request.query_params.get("stream", "false") != "false":
            raise InvalidRequestError("stream", "is not supported for a response that is complete")
        found = None
        if store is not None:
            found = await asyncio.to_thread(store.get, response_id, _owner(request.scope))
        if found is None:
            raise _not_found(response_id)
        return Response(found.body, media_type="application/json")

    async def delete(request: Request) -> Response:
        response_id = request.path_params["response_id"]
        if store is None or not await asyncio.to_thread(store.delete, response_id, _owner(request.scope)):
            raise _not_found(response_id)
        fields = {"id": response_id, "object": "response", "deleted": True}
        return Response(msgspec.json.encode(fields), media_type="application/json")

    path, answer = "/v1/responses", "OpenAI's response, or with `stream` its events"
    one = path + "/{response_id}"
    return [
        Operation(path, GenerateEndpoint(state, begin), ResponseBody.__doc__ or "", answer, ResponseBody),
        Operation(one, look, "A response that was stored.", "OpenAI's response"),
        Operation(one, delete, "Delete a response.", "`id`, `object`, `deleted`", deletes=True),
    ]


def _owner(scope: Scope) -> str:
    admission: Admission = scope[ADMISSION]
    return admission.key.entry.name


def _not_found(response_id: str) -> ApiError:
    return ApiError(404, f"there is no response {response_id!r}, or no more")
