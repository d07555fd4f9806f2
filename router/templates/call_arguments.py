"""The arguments of a conversation's tool calls, as chat templates take them.

Clients send back whatever the server gave out: a call may have been cut off by its answer's limit, and the
model's own text may not be JSON.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from protocol.errors import InvalidRequestError
from router.openai_types import MAX_ARGUMENT_BYTES

_CLOSERS = {"{": "}", "[": "]"}
_PIECE = re.compile(
    r'(?P<string>"(?:[^"\\]+|\\u[0-9a-fA-F]{4}|\\[^u])*+)(?:"|(?P<cut>(?:\\(?:u[0-9a-fA-F]{0,3})?)?\Z))'
    r"|[][{},]",
    re.DOTALL,
)

_UNFINISHED = re.compile(r',?\s*(?:"(?:[^"\\]|\\.)*+\\?"?\s*:?\s*)?[-+.\w]*\Z', re.DOTALL)
"""Matches a key, or a key and the beginning of its number."""


class CallArguments(dict[str, Any]):
    """A call's arguments: a mapping for templates that read it, JSON text for templates that print it."""

    def __str__(self) -> str:
        return json.dumps(self, ensure_ascii=False)

    def __add__(self, text: str) -> str:
        return str(self) + text

    def __radd__(self, text: str) -> str:
        return text + str(self)


def call_arguments(text: str, field: str) -> CallArguments:
    """Parse a request's arguments. Raises `InvalidRequestError` for a text that is too long."""
    if len(text.encode(errors="replace")) > MAX_ARGUMENT_BYTES:
        raise InvalidRequestError(field, f"at most {MAX_ARGUMENT_BYTES} bytes of JSON")
    return parsed_arguments(text)


def parsed_arguments(text: str) -> CallArguments:
    """Parse arguments. An object that was cut off is closed; any other text or value becomes the only
    argument, `arguments`.
    """
    if not text.strip():
        return CallArguments()
    for attempt in _attempts(text):
        try:
            found = json.loads(attempt, strict=False)
        except (ValueError, RecursionError):
            continue
        if found is None:
            return CallArguments()
        return _without_surrogates(found if isinstance(found, dict) else {"arguments": found})
    return _without_surrogates({"arguments": text})


def _attempts(text: str) -> Iterator[str]:
    """Yield the text; if it was cut off, also the closed text, and the text closed after its last complete
    part.
    """
    yield text
    closers: list[str] = []
    end = whole = len(text)
    is_cut_string = False
    for piece in _PIECE.finditer(text):
        mark = piece[0]
        if piece["string"] is not None:
            end, is_cut_string = piece.end("string"), piece["cut"] is not None
            continue
        whole = piece.start() if mark == "," else piece.end()
        if mark in _CLOSERS:
            closers.append(_CLOSERS[mark])
        elif mark != "," and (not closers or closers.pop() != mark):
            return
    if closers:
        closing = "".join(reversed(closers))
        yield (text[:end] + '"' if is_cut_string else text) + closing
        if _UNFINISHED.match(text, whole):
            yield text[:whole] + closing


def _without_surrogates(found: dict[str, Any]) -> CallArguments:
    """Replace lone surrogates, which JSON escapes can contain but UTF-8 text cannot."""
    written = json.dumps(found, ensure_ascii=False)
    try:
        written.encode()
    except UnicodeEncodeError:
        found = json.loads(written.encode(errors="replace"))
    return CallArguments(found)
