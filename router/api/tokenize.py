"""`POST /tokenize` and `POST /detokenize`, in vLLM's shapes."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from starlette.requests import Request
from starlette.responses import Response

from router.registry import ModelFacts
from router.state import RouterState


def converter(
    state: RouterState, build: Callable[[bytes, ModelFacts], bytes]
) -> Callable[[Request], Awaitable[Response]]:
    """An endpoint: `build` makes the answer of the body."""

    async def convert(request: Request) -> Response:
        async with state.bodies.read(request) as raw:
            answer = await state.tokenizer.off_loop(len(raw), build, raw, state.require_ready())
        return Response(answer, media_type="application/json")

    return convert
