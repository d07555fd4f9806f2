"""Converts Anthropic's messages and their blocks to a chat's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import msgspec

from protocol.errors import InvalidRequestError
from router.answers.parsed_chat import AnswerPart, CallStart, MoreArguments
from router.anthropic.body import Block, Message, SystemBlock
from router.openai_types import CalledFunction, ChatMessage, ContentPart, ToolCall
from router.parsing.answer import Content, Reasoning
from router.reading.converted_chat import ConvertedMessages
from router.templates.messages import parsed_arguments

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


Fields = dict[str, Any]


class ContentBlocks:
    """The content blocks of one answer. All `blocks` are complete except the last one while it is open."""

    def __init__(self, signature: str) -> None:
        """`signature` is that of thinking blocks: clients send back only signed ones."""
        self.blocks: list[Fields] = []
        self._signature = signature
        self._is_open = False
        self._pieces: list[str] = []
        """The text or the arguments of the open block."""

    def push(self, part: AnswerPart) -> Iterator[Fields]:
        """Add a part of the answer and yield its events."""
        match part:
            case Content(text):
                yield from self._text({"type": "text", "text": ""}, text)
            case Reasoning(text):
                yield from self._text({"type": "thinking", "thinking": "", "signature": ""}, text)
            case CallStart(_, call_id, name):
                yield from self.close()
                yield self._open({"type": "tool_use", "id": call_id, "name": name, "input": {}})
            case MoreArguments(_, text):
                yield self._more("input_json_delta", "partial_json", text)

    def close(self) -> Iterator[Fields]:
        """Close the open block and yield its last events."""
        if not self._is_open:
            return
        block, text = self.blocks[-1], "".join(self._pieces)
        self._is_open, self._pieces = False, []
        if block["type"] == "tool_use":
            block["input"] = parsed_arguments(text)
        else:
            block[block["type"]] = text
        if block["type"] == "thinking":
            block["signature"] = self._signature
            yield self._delta({"type": "signature_delta", "signature": self._signature})
        yield {"type": "content_block_stop", "index": len(self.blocks) - 1}

    def _text(self, empty: Fields, text: str) -> Iterator[Fields]:
        kind = empty["type"]
        if not self._is_open or self.blocks[-1]["type"] != kind:
            yield from self.close()
            yield self._open(empty)
        yield self._more(f"{kind}_delta", kind, text)

    def _open(self, block: Fields) -> Fields:
        self.blocks.append(block)
        self._is_open = True
        index = len(self.blocks) - 1
        return {"type": "content_block_start", "index": index, "content_block": dict(block)}

    def _more(self, kind: str, name: str, text: str) -> Fields:
        self._pieces.append(text)
        return self._delta({"type": kind, name: text})

    def _delta(self, delta: Fields) -> Fields:
        return {"type": "content_block_delta", "index": len(self.blocks) - 1, "delta": delta}
