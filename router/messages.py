"""A chat's messages, checked, as chat templates take them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from protocol.errors import InvalidRequestError
from router.decoding import decode_object, refuse_unsupported
from router.openai_types import MAX_ARGUMENT_BYTES, ChatMessage, ToolCall

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}


class CallArguments(dict[str, Any]):
    """A call's arguments: an object to templates that look into it, JSON text to those that write it."""

    def __str__(self) -> str:
        return json.dumps(self, ensure_ascii=False)

    def __add__(self, text: str) -> str:
        return str(self) + text

    def __radd__(self, text: str) -> str:
        return text + str(self)


def plain_messages(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """For the chat template. Raises `InvalidRequestError`."""
    if not messages:
        raise InvalidRequestError("messages", "must not be empty")
    calls: dict[str, str] = {}
    """Functions that were called, by the calls' ids."""
    return [_plain(message, f"messages[{index}].", calls) for index, message in enumerate(messages)]


def _plain(message: ChatMessage, at: str, calls: dict[str, str]) -> dict[str, Any]:
    if message.role not in _ROLES:
        raise InvalidRequestError(f"{at}role", f"must be one of {', '.join(_ROLES)}; got {message.role!r}")
    refuse_unsupported(message, at)
    is_assistant = message.role == "assistant"
    if message.tool_calls and not is_assistant:
        raise InvalidRequestError(f"{at}tool_calls", "only allowed in messages of the assistant")
    if message.content is None and not message.tool_calls:
        raise InvalidRequestError(f"{at}content", "is required")
    fields: dict[str, Any] = {"role": _ROLES[message.role], "content": _text(message, at)}
    if message.name is not None:
        fields["name"] = message.name
    if message.reasoning_content is not None and is_assistant:
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
    field = f"{at}function.arguments"
    raw = call.function.arguments.encode()
    arguments = CallArguments(decode_object(raw, field, MAX_ARGUMENT_BYTES) or {})
    return {
        "id": call.id,
        "type": "function",
        "function": {"name": call.function.name, "arguments": arguments},
    }


def _text(message: ChatMessage, at: str) -> str | None:
    content = message.content
    if content is None or isinstance(content, str):
        return content
    texts = []
    for index, part in enumerate(content):
        if part.type != "text":
            raise InvalidRequestError(
                f"{at}content[{index}].type", f"only 'text' parts are supported, got {part.type!r}"
            )
        if part.text is None:
            raise InvalidRequestError(f"{at}content[{index}].text", "is required")
        texts.append(part.text)
    return "\n".join(texts)
