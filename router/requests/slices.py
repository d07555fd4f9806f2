"""Slices of work that a client can make long, so that the event loop can run other tasks in between."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

import msgspec

SLICE_S = 0.005
ITEMS_AT_ONCE = 16
"""Number of items of a list that are encoded together."""

_json = msgspec.json.Encoder().encode
_json_with_iterators = msgspec.json.Encoder(enc_hook=list).encode


class Slices:
    """Turns of the event loop: in each one, a single slice of all long answers is made."""

    def __init__(self) -> None:
        self._turn = asyncio.Lock()

    async def of(self, pieces: Iterable[bytes]) -> AsyncIterator[bytes]:
        """Yield the pieces, joined by slice."""
        rest, is_over = iter(pieces), False
        while not is_over:
            async with self._turn:
                made, is_over = _slice(rest)
                if not is_over:
                    await asyncio.sleep(0)
            yield made


def _slice(pieces: Iterator[bytes]) -> tuple[bytes, bool]:
    """Return the pieces of one slice, joined, and whether the last piece is among them."""
    made, until = [], time.perf_counter() + SLICE_S
    for piece in pieces:
        made.append(piece)
        if time.perf_counter() >= until:
            return b"".join(made), False
    return b"".join(made), True


def json_pieces(value: Any, *, is_short: bool = False) -> Iterator[bytes]:
    """Yield JSON in small pieces, or in one if `is_short`. An iterator is written as a list of its items."""
    if is_short:
        yield _json_with_iterators(value)
    elif isinstance(value, Mapping):
        yield b"{"
        yield from json_members(value)
    elif isinstance(value, Iterator):
        before = b"["
        while items := list(islice(value, ITEMS_AT_ONCE)):
            yield before + _json(items)[1:-1]
            before = b","
        yield b"[]" if before == b"[" else b"]"
    else:
        yield _json(value)


def json_members(fields: Mapping[str, Any]) -> Iterator[bytes]:
    """Yield the members of a JSON object and its closing brace, in small pieces."""
    before = b""
    for name, member in fields.items():
        yield before + _json(name) + b":"
        yield from json_pieces(member)
        before = b","
    yield b"}"
