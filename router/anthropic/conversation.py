"""Converts Anthropic's messages to a chat's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import msgspec

from protocol.errors import InvalidRequestError
from router.anthropic.body import Block, Message, SystemBlock
from router.openai_types import CalledFunction, ChatMessage, ContentPart, ToolCall
from router.reading.converted_chat import ConvertedMessages

_ROLES = ("user", "assistant", "system")
_UNSEEN = "x-anthropic-billing-header"
"""A client's block for Anthropic alone. It differs in each request, so no prefix after it would be cached."""


class MessageConversation(ConvertedMessages):
    """Collects the `messages` of Anthropic's. Each result of a tool is a message of its own."""

    tool_names: ClassVar = {"tool_call_id": "tool_use_id"}
    call_names: ClassVar = {"arguments": "input"}

    def add_system(self, system: str | Sequence[SystemBlock]) -> None:
        """Append the system prompt. Raises `InvalidRequestError`."""
        if isinstance(system, str):
            self._append(ChatMessage(role="system", content=system), "system")
            return
        for index, block in enumerate(system):
            if block.type != "text":
                raise InvalidRequestError(f"system[{index}].type", f"must be 'text', got {block.type!r}")
        seen = [block for block in system if not block.text.startswith(_UNSEEN)]
        if seen:
            parts = [ContentPart(type="text", text=block.text) for block in seen]
            self._append(ChatMessage(role="system", content=parts), "system")

    def add(self, message: Message, at: str) -> None:
        """Append one message. Raises `InvalidRequestError`."""
        if message.role not in _ROLES:
            reason = f"must be one of {', '.join(_ROLES)}; got {message.role!r}"
            raise InvalidRequestError(f"{at}.role", reason)
        if isinstance(message.content, str):
            self._append(ChatMessage(role=message.role, content=message.content), at)
        elif message.role == "assistant":
            self._add_answer(message.content, at)
        else:
            self._add_blocks(message.role, message.content, at)

    @property
    def is_begun(self) -> bool:
        """Whether the last message is the beginning of the answer."""
        last = self.messages[-1] if self.messages else None
        return last is not None and last.role == "assistant" and bool(last.content) and not last.tool_calls

    def _add_answer(self, blocks: Sequence[Block], at: str) -> None:
        message = self._append(ChatMessage(role="assistant", content=None), at)
        texts, thoughts = [], []
        for index, block in enumerate(blocks):
            place = f"{at}.content[{index}]"
            match block.type:
                case "text":
                    texts.append(_part(block, place))
                case "thinking":
                    thoughts.append(_given(block.thinking, f"{place}.thinking"))
                case "redacted_thinking":
                    pass
                case "tool_use":
                    self._append_call(_call(block, place), place)
                case other:
                    raise _unknown(place, "text, thinking or tool_use", other)
        if texts or not (thoughts or message.tool_calls):
            message.content = texts
        if thoughts:
            message.reasoning_content = "".join(thoughts)

    def _add_blocks(self, role: str, blocks: Sequence[Block], at: str) -> None:
        """Append the results of tools, and the text before, between and after them."""
        texts: list[ContentPart] = []
        for index, block in enumerate(blocks):
            place = f"{at}.content[{index}]"
            if block.type == "text":
                texts.append(_part(block, place))
            elif block.type == "tool_result" and role == "user":
                if texts:
                    self._append(ChatMessage(role=role, content=texts), at)
                    texts = []
                result = ChatMessage(role="tool", content=_result(block), tool_call_id=block.tool_use_id)
                self._append(result, place)
            else:
                raise _unknown(place, "text or tool_result", block.type)
        if texts or not blocks:
            self._append(ChatMessage(role=role, content=texts), at)


def _result(block: Block) -> str | list[ContentPart]:
    """Return the content of a tool's result; chat templates have no other place to tell an error."""
    content = block.content or ""
    if not block.is_error:
        return content
    if isinstance(content, str):
        return f"Error: {content}"
    first, *others = content
    return [msgspec.structs.replace(first, text=f"Error: {first.text or ''}"), *others]


def _part(block: Block, at: str) -> ContentPart:
    return ContentPart(type="text", text=_given(block.text, f"{at}.text"))


def _call(block: Block, at: str) -> ToolCall:
    function = CalledFunction(
        name=_given(block.name, f"{at}.name"), arguments=bytes(block.input or b"{}").decode()
    )
    return ToolCall(id=_given(block.id, f"{at}.id"), function=function)


def _given(value: str | None, field: str) -> str:
    if value is None:
        raise InvalidRequestError(field, "is required")
    return value


def _unknown(at: str, known: str, got: str) -> InvalidRequestError:
    reason = "images are not supported" if got == "image" else f"must be {known}, got {got!r}"
    return InvalidRequestError(f"{at}.type", reason)
