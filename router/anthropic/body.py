"""The request body of `/v1/messages` and `/v1/messages/count_tokens`, as Anthropic defines it."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta, Raw

from router.openai_types import (
    MAX_MESSAGES,
    MAX_STOPS,
    MAX_TOOLS,
    CallableName,
    ContentPart,
    Object,
    SamplingBody,
    TemplateVariables,
    Unsupported,
    Word,
)


def _doc(text: str) -> Meta:
    return Meta(description=text)


def _absent() -> Any:
    return msgspec.field(default_factory=Raw)


class Block(msgspec.Struct, kw_only=True):
    """A content block."""

    type: Annotated[
        str, _doc("`text`, `tool_use`, `tool_result`, `thinking` or `redacted_thinking`, which is ignored.")
    ]
    text: Annotated[str | None, _doc("The text of a `text` block.")] = None
    thinking: Annotated[
        str | None, _doc("The assistant's reasoning; the chat template decides whether to show it.")
    ] = None
    id: Annotated[str | None, _doc("The id of a `tool_use`.")] = None
    name: Annotated[str | None, _doc("The name of the used tool.")] = None
    input: Annotated[Object, _doc("The arguments of a `tool_use`.")] = _absent()
    tool_use_id: Annotated[str | None, _doc("In a `tool_result`: the id of its `tool_use`.")] = None
    content: Annotated[
        str | list[ContentPart] | None, _doc("The text of a `tool_result`; default: none.")
    ] = None


class SystemBlock(msgspec.Struct, kw_only=True):
    """A part of the system prompt."""

    type: Annotated[str, _doc("`text`.")]
    text: Annotated[str, _doc("The part's text.")]


class Message(msgspec.Struct, kw_only=True):
    """One message of a conversation."""

    role: Annotated[str, _doc("`user`, `assistant` or `system`.")]
    content: Annotated[str | list[Block], _doc("The message's text, or blocks.")]


class MessageTool(msgspec.Struct, kw_only=True):
    """A tool that the model may use."""

    type: Annotated[str | None, _doc("`custom`, the default; others are not supported.")] = None
    name: Annotated[CallableName, _doc("The tool's name.")]
    description: Annotated[str | None, _doc("Tells the model what it does and when to use it.")] = None
    input_schema: Annotated[Object, _doc("A JSON schema of the arguments.")] = _absent()
    strict: Annotated[bool | None, _doc("The arguments always satisfy the schema; default: false.")] = None


class MessageToolChoice(msgspec.Struct, kw_only=True):
    """Whether the answer uses tools."""

    type: Annotated[str, _doc("`auto` (the default), `any`, `tool` or `none`.")]
    name: Annotated[str | None, _doc("The tool to use, with the type `tool`.")] = None
    disable_parallel_tool_use: Annotated[
        bool | None, _doc("Use at most one tool; default: false, unless a tool must be used.")
    ] = None


class Thinking(msgspec.Struct, kw_only=True):
    """Options of the model's reasoning."""

    type: Annotated[
        str,
        _doc(
            "`enabled` or `disabled`: the variables `enable_thinking` and `thinking` of the chat template; "
            "`adaptive`: as the template has it."
        ),
    ]
    budget_tokens: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        _doc("Most tokens of reasoning, with the type `enabled`; after that many, the reasoning is ended."),
    ] = None


class OutputFormat(msgspec.Struct, kw_only=True):
    """The required format of the answer's text."""

    type: Annotated[str, _doc("`json_schema`.")]
    schema: Annotated[Object, _doc("The JSON schema.")] = _absent()


class OutputConfig(msgspec.Struct, kw_only=True):
    """Options of the answer."""

    effort: Annotated[str | None, _doc("Passed to the chat template as `reasoning_effort`.")] = None
    format: Annotated[OutputFormat | None, _doc("Default: free text.")] = None


class MessageBody(SamplingBody, kw_only=True):
    """Answer a conversation, or count its tokens."""

    messages: Annotated[
        Annotated[list[Message], Meta(max_length=MAX_MESSAGES)],
        _doc("The conversation so far; a last message of the assistant is continued."),
    ]
    max_tokens: Annotated[
        int | None, _doc("Most tokens to generate; required, except for counting tokens.")
    ] = None
    system: Annotated[str | list[SystemBlock] | None, _doc("The system prompt.")] = None
    stop_sequences: Annotated[
        Annotated[list[Word], Meta(max_length=MAX_STOPS)] | None, _doc("Strings that end the answer.")
    ] = None
    tools: Annotated[
        Annotated[list[MessageTool], Meta(max_length=MAX_TOOLS)] | None,
        _doc("Tools that the model may use."),
    ] = None
    tool_choice: Annotated[MessageToolChoice | None, _doc("Whether the answer uses tools.")] = None
    thinking: Annotated[Thinking | None, _doc("Options of the reasoning; default: the template's.")] = None
    output_config: Annotated[OutputConfig | None, _doc("The answer's format, and its effort.")] = None
    chat_template_kwargs: TemplateVariables = _absent()

    stop: Unsupported = _absent()  # type: ignore[assignment]
    container: Unsupported = _absent()
    mcp_servers: Unsupported = _absent()
    n: Unsupported = _absent()
    response_format: Unsupported = _absent()
