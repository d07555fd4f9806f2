"""Converts a conversation's items to a chat's messages."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import ClassVar

from protocol.errors import InvalidRequestError
from router.openai_types import CalledFunction, ChatMessage, ContentPart, ToolCall
from router.reading.converted_chat import ConvertedMessages
from router.responses.body import Item, ItemPart

_ROLES = ("user", "assistant", "system", "developer")
_TEXT_PARTS = ("input_text", "output_text", "reasoning_text", "summary_text", "text")


class Conversation(ConvertedMessages):
    """Collects the `messages` of items. Consecutive reasoning, text and calls of the assistant form one
    message.
    """

    tool_names: ClassVar = {"tool_call_id": "call_id", "content": "output"}

    def __init__(self, answered: Collection[str | None] = ()) -> None:
        """`answered` has the ids of calls that have an output. Other calls are left out if they are
        incomplete.
        """
        super().__init__()
        self._answered = answered

    def add_instructions(self, text: str) -> None:
        self._append(ChatMessage(role="system", content=text), "instructions")

    def add_items(self, items: Sequence[Item], field: str) -> None:
        """Append the items' messages. Raises `InvalidRequestError`."""
        for index, item in enumerate(items):
            at = f"{field}[{index}]"
            match item.type:
                case "message":
                    self._add_message(item, at)
                case "reasoning":
                    self._add_reasoning(item, at)
                case "function_call":
                    self._add_call(item, at)
                case "function_call_output":
                    content = _parts(item.output, f"{at}.output")
                    self._append(ChatMessage(role="tool", content=content, tool_call_id=item.call_id), at)
                case other:
                    kinds = "message, reasoning, function_call or function_call_output"
                    raise InvalidRequestError(f"{at}.type", f"must be {kinds}, got {other!r}")

    def _assistant(self, at: str, is_first: bool) -> ChatMessage:
        """Return the assistant's last message, or a new one if what follows must begin one (`is_first`)."""
        last = self.messages[-1] if self.messages else None
        if last is None or last.role != "assistant" or (is_first and (last.content or last.tool_calls)):
            last = self._append(ChatMessage(role="assistant", content=""), at)
        return last

    def _add_message(self, item: Item, at: str) -> None:
        if item.role not in _ROLES:
            raise InvalidRequestError(f"{at}.role", f"must be one of {', '.join(_ROLES)}; got {item.role!r}")
        content = _parts(item.content, f"{at}.content")
        if item.role == "assistant":
            self._assistant(at, True).content = content
        else:
            self._append(ChatMessage(role=item.role, content=content), at)

    def _add_reasoning(self, item: Item, at: str) -> None:
        message = self._assistant(at, True)
        content = item.summary if item.content is None else item.content
        parts = _parts(content or "", f"{at}.content")
        thought = parts if isinstance(parts, str) else "\n".join(part.text or "" for part in parts)
        message.reasoning_content = (message.reasoning_content or "") + thought

    def _add_call(self, item: Item, at: str) -> None:
        if item.status == "incomplete" and item.call_id not in self._answered:
            return
        for name in ("call_id", "name", "arguments"):
            if getattr(item, name) is None:
                raise InvalidRequestError(f"{at}.{name}", "is required")
        message = self._assistant(at, False)
        function = CalledFunction(name=item.name or "", arguments=item.arguments or "")
        self._append_call(ToolCall(id=item.call_id or "", function=function), at)
        message.content = message.content or None


def _parts(content: str | list[ItemPart] | None, field: str) -> str | list[ContentPart]:
    if content is None:
        raise InvalidRequestError(field, "is required")
    if isinstance(content, str):
        return content
    return [_part(part, f"{field}[{index}].") for index, part in enumerate(content)]


def _part(part: ItemPart, at: str) -> ContentPart:
    if part.type == "refusal":
        return ContentPart(type="text", text=part.refusal)
    if part.type not in _TEXT_PARTS:
        raise InvalidRequestError(f"{at}type", f"only text is supported, got {part.type!r}")
    return ContentPart(type="text", text=part.text)
