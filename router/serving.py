"""Runs a generation and writes its answer, whole or as a stream."""

from __future__ import annotations

import asyncio

from router.dispatcher import Dispatcher
from router.exchange import ClientGoneError, Exchange
from router.formats import Format, error_event
from router.journal import Generation


async def serve_generation(
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
