"""Endpoints for clients that generate nothing: models, tokens and stored responses."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from starlette.responses import Response

from protocol.errors import InvalidRequestError
from protocol.requests import Adapter
from router.anthropic.request import MessageBody
from router.api.access import Admitted, Json, State, posted
from router.api_keys import Admission
from router.errors import ApiError
from router.openai_types import DetokenizeBody, TokenizeBody
from router.responses.store import MAX_PAGE, Order, StoredResponse, page_of
from router.state import RouterState

router = APIRouter()


@router.get("/v1/models", response_description="OpenAI's list of models")
async def list_models(state: State) -> Response:
    """List the model, and its adapters with it as their `parent`."""
    base = _model_card(state)
    others = [{**base, "id": name} for name in state.config.model_names[1:]]
    cards = [_adapter_card(base, each) for each in state.adapters.named.values()]
    return Json({"object": "list", "data": [base, *others, *cards]})


@router.get("/v1/models/{model_id:path}", response_description="OpenAI's model, with `max_model_len`")
async def show_model(state: State, model_id: str) -> Response:
    """Show one model."""
    base, adapter = _model_card(state), state.adapters.find(model_id)
    return Json({**base, "id": model_id} if adapter is None else _adapter_card(base, adapter))


@router.post("/tokenize", **posted(TokenizeBody, "`count`, `max_model_len`, `tokens`, `token_strs`"))
async def tokenize(request: Request, state: State) -> Response:
    return await _convert(request, state, "tokenize")


@router.post("/detokenize", **posted(DetokenizeBody, "`prompt`"))
async def detokenize(request: Request, state: State) -> Response:
    return await _convert(request, state, "detokenize")


@router.post("/v1/messages/count_tokens", **posted(MessageBody, "`input_tokens`"))
async def count_tokens(request: Request, state: State) -> Response:
    return await _convert(request, state, "count_tokens")


@router.get("/v1/responses/{response_id}", response_description="OpenAI's response")
async def get_response(
    state: State, admission: Admitted, response_id: str, stream: str = "false"
) -> Response:
    """Return a stored response."""
    if stream != "false":
        raise InvalidRequestError("stream", "is not supported for a response that is complete")
    found = await _stored(state, admission, response_id)
    return Response(found.body, media_type="application/json")


@router.get("/v1/responses/{response_id}/input_items", response_description="OpenAI's list of items")
async def list_input_items(
    state: State,
    admission: Admitted,
    response_id: str,
    after: str | None = None,
    limit: Annotated[int, Query(ge=1, le=MAX_PAGE)] = 20,
    order: Order = "desc",
) -> Response:
    """List the items that a stored response answered, with those of the responses that it continues."""
    found = await _stored(state, admission, response_id)
    page = await asyncio.to_thread(page_of, found, after, limit, order)
    return Response(page, media_type="application/json")


@router.post("/v1/responses/{response_id}/cancel")
async def cancel_response(state: State, admission: Admitted, response_id: str) -> Response:
    """Refuse, as for all responses without `background`: to cancel one, close its connection."""
    await _stored(state, admission, response_id)
    raise ApiError(400, f"response {response_id!r} is complete: only background responses can be cancelled")


@router.delete("/v1/responses/{response_id}", response_description="`id`, `object`, `deleted`")
async def delete_response(state: State, admission: Admitted, response_id: str) -> Response:
    """Delete a response."""
    store, owner = state.responses, admission.key.entry.name
    if store is None or not await asyncio.to_thread(store.delete, response_id, owner):
        raise _not_found(response_id)
    return Json({"id": response_id, "object": "response", "deleted": True})


async def _convert(request: Request, state: RouterState, task: str) -> Response:
    async with state.bodies.read(request) as raw:
        answer = await state.requests.read(task, raw, state.require_served())
    assert isinstance(answer, bytes)
    return Response(answer, media_type="application/json")


async def _stored(state: RouterState, admission: Admission, response_id: str) -> StoredResponse:
    """Return the client's stored response. Raises `ApiError`."""
    store, owner = state.responses, admission.key.entry.name
    found = None if store is None else await asyncio.to_thread(store.get, response_id, owner)
    if found is None:
        raise _not_found(response_id)
    return found


def _not_found(response_id: str) -> ApiError:
    return ApiError(404, f"there is no response {response_id!r}, or no more")


def _adapter_card(base: dict[str, Any], adapter: Adapter) -> dict[str, Any]:
    return {**base, "id": adapter.name, "root": adapter.path, "parent": base["id"]}


def _model_card(state: RouterState) -> dict[str, Any]:
    facts = state.registry.model
    return {
        "id": state.config.model_name,
        "object": "model",
        "created": state.created,
        "owned_by": "tandem",
        "root": state.config.model,
        "parent": None,
        "default_sampling_params": state.defaults.shown(),
        "deterministic": _deterministic(state),
        "max_model_len": facts.max_model_len if facts is not None else state.config.max_model_len,
        "capabilities": {
            "completions": True,
            "chat_completions": state.chats.has_template,
            "responses": state.chats.has_template,
            "messages": state.chats.has_template,
            "embeddings": state.config.enable_embeddings,
            "tools": state.chats.has_tools,
            "reasoning": state.chats.has_reasoning,
        },
        "permission": [],
    }


def _deterministic(state: RouterState) -> bool | None:
    """Return whether all workers give a request the same bits in every batch; None without workers."""
    answers = [worker.start_up.get("deterministic") == "yes" for worker in state.registry]
    return all(answers) if answers else None
