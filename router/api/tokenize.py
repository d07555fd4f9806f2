"""`POST /tokenize` and `/detokenize`, in vLLM's shapes, and `/v1/messages/count_tokens`."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from router.anthropic.body import MessageBody
from router.api.access import State
from router.api.openapi import posted
from router.openai_types import DetokenizeBody, TokenizeBody
from router.state import RouterState

router = APIRouter()


@router.post("/tokenize", **posted(TokenizeBody, "`count`, `max_model_len`, `tokens`, `token_strs`"))
async def tokenize(request: Request, state: State) -> Response:
    return await _convert(request, state, "tokenize")


@router.post("/detokenize", **posted(DetokenizeBody, "`prompt`"))
async def detokenize(request: Request, state: State) -> Response:
    return await _convert(request, state, "detokenize")


@router.post("/v1/messages/count_tokens", **posted(MessageBody, "`input_tokens`"))
async def count_tokens(request: Request, state: State) -> Response:
    return await _convert(request, state, "count_tokens")


async def _convert(request: Request, state: RouterState, task: str) -> Response:
    """Answer with the task's result."""
    async with state.bodies.read(request) as raw:
        answer = await state.requests.convert(task, raw, state.require_served())
    return Response(answer, media_type="application/json")
