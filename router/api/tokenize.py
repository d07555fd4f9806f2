"""`POST /tokenize` and `POST /detokenize`, in vLLM's shapes."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from starlette.requests import Request
from starlette.responses import Response

from router.state import RouterState


def converter(state: RouterState, task: str) -> Callable[[Request], Awaitable[Response]]:
    """Return an endpoint that answers with the task's result."""

    async def convert(request: Request) -> Response:
        async with state.bodies.read(request) as raw:
            answer = await state.requests.convert(task, raw, state.require_served())
        return Response(answer, media_type="application/json")

    return convert
