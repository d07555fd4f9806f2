"""Reads requests of `/v1/messages`: each becomes a chat's."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import Raw

from protocol.errors import InvalidRequestError
from router.anthropic.body import MessageBody, MessageTool, OutputFormat
from router.anthropic.conversation import MessageConversation
from router.decoding import decode_body, decode_object, refuse_unsupported
from router.openai_types import (
    ChatBody,
    Function,
    FunctionName,
    JsonSchemaFormat,
    NamedTool,
    ResponseFormat,
    SamplingBody,
    Tool,
)
from router.reading.converted_chat import ConvertedChat, renamer
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
