"""Reads requests of `/v1/messages`: each becomes a chat's, with its messages and their blocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import msgspec
from msgspec import Raw

from protocol.errors import InvalidRequestError
from router.anthropic.body import Block, Message, MessageBody, MessageTool, OutputFormat, SystemBlock
from router.decoding import decode_body, decode_object, refuse_unsupported
from router.openai_types import (
    CalledFunction,
    ChatBody,
    ChatMessage,
    ContentPart,
    Function,
    FunctionName,
    JsonSchemaFormat,
    NamedTool,
    ResponseFormat,
    SamplingBody,
    Tool,
    ToolCall,
)
from router.reading.converted_chat import ConvertedChat, ConvertedMessages, renamer
from router.reading.prepared import Prepared
from router.reading.request_reader import RequestReader
from router.reading.served import ServedModel

own_field = renamer(
    {
        r"^stop$": "stop_sequences",
        r"^reasoning_effort$": "output_config.effort",
        r"^response_format(\.json_schema)?": "output_config.format",
        r"^(tools\[\d+\])\.function\.parameters": r"\1.input_schema",
        r"^(tools\[\d+\])\.function": r"\1",
    }
)
_SHARED = [name for name in SamplingBody.__struct_fields__ if name != "stop"]
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_THINKS = {"enabled": True, "disabled": False}


def read_message(reader: RequestReader, raw: bytes, model: ServedModel) -> Prepared:
    """Read a request for an answer. Raises `ApiError` or `InvalidRequestError`, which name its fields."""
    body = decode_body(raw, MessageBody)
    if body.max_tokens is None:
        raise InvalidRequestError("max_tokens", "is required")
    budget = None if body.thinking is None else body.thinking.budget_tokens
    if budget is not None and budget >= body.max_tokens:
        limit = f"must be less than max_tokens, {body.max_tokens}; got {budget}"
        raise InvalidRequestError("thinking.budget_tokens", limit)
    return _chat(body, reader.chats.has_reasoning).read(reader.chat_of, model)


def count_tokens(reader: RequestReader, raw: bytes, model: ServedModel) -> bytes:
    """Return the number of the prompt's tokens, as JSON. Raises as `read_message`."""
    chat = _chat(decode_body(raw, MessageBody), reader.chats.has_reasoning)
    return msgspec.json.encode({"input_tokens": len(chat.read(reader.chat_tokens, model))})


def _chat(body: MessageBody, has_reasoning: bool) -> ConvertedChat:
    refuse_unsupported(body)
    conversation = MessageConversation()
    if body.system is not None:
        conversation.add_system(body.system)
    for index, message in enumerate(body.messages):
        conversation.add(message, f"messages[{index}]")
    choice, output, thinking = body.tool_choice, body.output_config, body.thinking
    wanted = None if output is None or output.format is None else _response_format(output.format)
    disabled = None if choice is None else choice.disable_parallel_tool_use
    chat = ChatBody(
        **{name: getattr(body, name) for name in _SHARED},
        messages=conversation.messages,
        max_tokens=body.max_tokens,
        stop=body.stop_sequences,
        tools=[_tool(tool, index) for index, tool in enumerate(body.tools or ())] or None,
        tool_choice=_tool_choice(body),
        parallel_tool_calls=None if disabled is None else not disabled,
        response_format=wanted,
        reasoning_effort=None if output is None else output.effort,
        thinking_token_budget=thinking.budget_tokens if thinking is not None and has_reasoning else None,
        chat_template_kwargs=_variables(body),
        continue_final_message=conversation.is_begun,
    )
    return ConvertedChat(chat, conversation, own_field)


def _tool(tool: MessageTool, index: int) -> Tool:
    if tool.type not in (None, "custom"):
        raise InvalidRequestError(f"tools[{index}].type", f"must be 'custom', got {tool.type!r}")
    function = Function(
        name=tool.name, description=tool.description, parameters=tool.input_schema, strict=tool.strict
    )
    return Tool(type="function", function=function)


def _tool_choice(body: MessageBody) -> str | NamedTool | None:
    choice = body.tool_choice
    if choice is None:
        return None
    if choice.type == "tool":
        if choice.name is None:
            raise InvalidRequestError("tool_choice.name", "is required with the type 'tool'")
        return NamedTool(type="function", function=FunctionName(name=choice.name))
    if choice.type not in _CHOICES:
        raise InvalidRequestError(
            "tool_choice.type", f"must be 'auto', 'any', 'tool' or 'none', got {choice.type!r}"
        )
    return _CHOICES[choice.type]


def _response_format(wanted: OutputFormat) -> ResponseFormat:
    if wanted.type != "json_schema":
        raise InvalidRequestError("output_config.format.type", f"must be 'json_schema', got {wanted.type!r}")
    return ResponseFormat(type="json_schema", json_schema=JsonSchemaFormat(schema=wanted.schema))


def _variables(body: MessageBody) -> Raw:
    """Return the template's variables. Families of models name the one that turns thinking on differently."""
    thinking = body.thinking
    if thinking is None or thinking.type == "adaptive":
        return body.chat_template_kwargs
    if thinking.type not in _THINKS:
        known = "'enabled', 'disabled' or 'adaptive'"
        raise InvalidRequestError("thinking.type", f"must be {known}, got {thinking.type!r}")
    thinks = _THINKS[thinking.type]
    given: dict[str, Any] = decode_object(body.chat_template_kwargs, "chat_template_kwargs") or {}
    return Raw(msgspec.json.encode({"enable_thinking": thinks, "thinking": thinks, **given}))


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
