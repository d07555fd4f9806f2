"""`GET` and `DELETE /v1/responses/{response_id}`: a stored response."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter
from starlette.responses import Response

from protocol.errors import InvalidRequestError
from router.api.access import Admitted, State
from router.api.openapi import Json
from router.errors import ApiError

router = APIRouter()


@router.get(
    "/v1/responses/{response_id}",
    summary="A response that was stored.",
    response_description="OpenAI's response",
)
async def get_response(
    state: State, admission: Admitted, response_id: str, stream: str = "false"
) -> Response:
    if stream != "false":
        raise InvalidRequestError("stream", "is not supported for a response that is complete")
    store, owner = state.responses, admission.key.entry.name
    found = None if store is None else await asyncio.to_thread(store.get, response_id, owner)
    if found is None:
        raise _not_found(response_id)
    return Response(found.body, media_type="application/json")


@router.delete(
    "/v1/responses/{response_id}",
    summary="Delete a response.",
    response_description="`id`, `object`, `deleted`",
)
async def delete_response(state: State, admission: Admitted, response_id: str) -> Response:
    store, owner = state.responses, admission.key.entry.name
    if store is None or not await asyncio.to_thread(store.delete, response_id, owner):
        raise _not_found(response_id)
    return Json({"id": response_id, "object": "response", "deleted": True})


def _not_found(response_id: str) -> ApiError:
    return ApiError(404, f"there is no response {response_id!r}, or no more")
