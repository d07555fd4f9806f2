"""`POST /v1/completions` and `/v1/chat/completions`: run a generation and write its answer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from router.dispatcher import Dispatcher
from router.exchange import ClientGoneError, Exchange
from router.formats import Format, error_event
from router.journal import Generation
from router.registry import ModelFacts
from router.request_builder import Built
from router.state import RouterState


class Generate:
    """A handler: `build` makes a generation of the body, `answer_format` writes what comes of it."""

    def __init__(
        self,
        state: RouterState,
        build: Callable[[bytes, ModelFacts, float], Built],
        answer_format: type[Format],
    ) -> None:
        self._state = state
        self._build = build
        self._format = answer_format

    async def __call__(self, exchange: Exchange) -> None:
        arrival = time.monotonic()
        state = self._state
        async with exchange.body() as raw:
            model = state.require_ready()
            built = await state.tokenizer.off_loop(len(raw), self._build, raw, model, arrival)
        generation, output = built
        answer = self._format(state.tokenizer, state.config.model_name, exchange.request_id, output)
        await _serve(exchange, state.dispatcher, generation, answer, output.stream)


async def _serve(
    exchange: Exchange, dispatcher: Dispatcher, generation: Generation, answer: Format, stream: bool
) -> None:
    """Raises `ApiError` when it fails before the answer began. A client that goes away ends it."""
    watcher = asyncio.ensure_future(exchange.wait_disconnect())
    watcher.add_done_callback(lambda _: dispatcher.cancel(generation))
    try:
        dispatcher.start(generation)
        if stream:
            await _stream(exchange, generation, answer)
        else:
            await _whole(exchange, generation, answer)
    finally:
        watcher.cancel()
        dispatcher.cancel(generation)


async def _whole(exchange: Exchange, generation: Generation, answer: Format) -> None:
    while not generation.is_over:
        await generation.wait()
    _raise_if_failed(generation)
    await exchange.send_json(answer.response(generation.choices))


async def _stream(exchange: Exchange, generation: Generation, answer: Format) -> None:
    await generation.wait()
    _raise_if_failed(generation)
    await exchange.start_events()
    while True:
        events = b"".join(
            [answer.chunk(choice, choice.take()) for choice in generation.choices if choice.has_news]
        )
        if generation.is_over:
            break
        await exchange.send_events(events)
        await generation.wait()
    if generation.error is not None:
        events += error_event(generation.error)
    else:
        events += answer.last_chunk(generation.choices)
    await exchange.send_events(events, more=False)


def _raise_if_failed(generation: Generation) -> None:
    if generation.error is not None:
        raise generation.error
    if generation.is_disconnected:
        raise ClientGoneError
