"""Checks a chat's messages and converts them, and the arguments of earlier calls, for the chat template."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

from protocol.errors import InvalidRequestError
from router.decoding import refuse_unsupported
from router.openai_types import MAX_ARGUMENT_BYTES, ChatMessage, ContentPart, ToolCall

Content: TypeAlias = str | list[dict[str, str]] | None
"""A message's text or its parts, as the client sent them."""

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}


def text_of(content: Content) -> str:
    """Return the content as one text."""
    if isinstance(content, list):
        return "\n".join(part["text"] for part in content)
    return content or ""


def plain_messages(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """Return the messages as the chat template reads them. Raises `InvalidRequestError`."""
    if not messages:
        raise InvalidRequestError("messages", "must not be empty")
    calls: dict[str, str] = {}
    """The called functions' names, by call id."""
    return [_plain(message, f"messages[{index}].", calls) for index, message in enumerate(messages)]


def _plain(message: ChatMessage, at: str, calls: dict[str, str]) -> dict[str, Any]:
    if message.role not in _ROLES:
        raise InvalidRequestError(f"{at}role", f"must be one of {', '.join(_ROLES)}; got {message.role!r}")
    refuse_unsupported(message, at)
    is_assistant = message.role == "assistant"
    if message.tool_calls and not is_assistant:
        raise InvalidRequestError(f"{at}tool_calls", "only allowed in messages of the assistant")
    has_thought = message.reasoning_content is not None and is_assistant
    if message.content is None and not message.tool_calls and not has_thought:
        raise InvalidRequestError(f"{at}content", "is required")
    fields: dict[str, Any] = {"role": _ROLES[message.role], "content": plain_content(message.content, at)}
    if message.name is not None:
        fields["name"] = message.name
    if has_thought:
        fields["reasoning_content"] = message.reasoning_content
    if message.tool_calls:
        fields["tool_calls"] = [
            _call(call, f"{at}tool_calls[{index}].") for index, call in enumerate(message.tool_calls)
        ]
        calls.update((call.id, call.function.name) for call in message.tool_calls)
    if message.role == "tool":
        call_id = message.tool_call_id
        if call_id not in calls:
            reason = "is required" if call_id is None else f"no message before it has the call {call_id!r}"
            raise InvalidRequestError(f"{at}tool_call_id", reason)
        fields = {"name": calls[call_id], "tool_call_id": call_id, **fields}
    return fields


def _call(call: ToolCall, at: str) -> dict[str, Any]:
    if call.type != "function":
        raise InvalidRequestError(f"{at}type", f"must be 'function', got {call.type!r}")
    arguments = call_arguments(call.function.arguments, f"{at}function.arguments")
    return {
        "id": call.id,
        "type": "function",
        "function": {"name": call.function.name, "arguments": arguments},
    }


def plain_content(content: str | list[ContentPart] | None, at: str) -> Content:
    """Return the content as the chat template reads it. Raises `InvalidRequestError`."""
    if content is None or isinstance(content, str):
        return content
    parts = []
    for index, part in enumerate(content):
        if part.type != "text":
            raise InvalidRequestError(
                f"{at}content[{index}].type", f"only 'text' parts are supported, got {part.type!r}"
            )
        if part.text is None:
            raise InvalidRequestError(f"{at}content[{index}].text", "is required")
        parts.append({"type": "text", "text": part.text})
    return parts


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
    """Parse arguments. An object that was cut off is closed; other text becomes the argument `arguments`."""
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
    """Yield the text; if it was cut off, also closed at its end, and after its last complete part."""
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
