"""`POST /tokenize` and `POST /detokenize`, in vLLM's shapes."""

from __future__ import annotations

from collections.abc import Callable

from router.exchange import Exchange
from router.registry import ModelFacts
from router.state import RouterState


class Convert:
    """A handler: `build` makes the answer of the body."""

    def __init__(self, state: RouterState, build: Callable[[bytes, ModelFacts], bytes]) -> None:
        self._state = state
        self._build = build

    async def __call__(self, exchange: Exchange) -> None:
        state = self._state
        async with exchange.body() as raw:
            answer = await state.tokenizer.off_loop(len(raw), self._build, raw, state.require_ready())
        await exchange.send_json(answer)
