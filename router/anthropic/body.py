"""The request body of `/v1/messages` and `/v1/messages/count_tokens`, as Anthropic defines it."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from protocol.fields import doc
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
    absent,
)


class Block(msgspec.Struct, kw_only=True):
    """A content block."""

    type: Annotated[
        str, doc("`text`, `tool_use`, `tool_result`, `thinking` or `redacted_thinking`, which is ignored.")
    ]
    text: Annotated[str | None, doc("The text of a `text` block.")] = None
    thinking: Annotated[
        str | None, doc("The assistant's reasoning; the chat template decides whether to show it.")
    ] = None
    id: Annotated[str | None, doc("The id of a `tool_use`.")] = None
    name: Annotated[str | None, doc("The name of the used tool.")] = None
    input: Annotated[Object, doc("The arguments of a `tool_use`.")] = absent()
    tool_use_id: Annotated[str | None, doc("In a `tool_result`: the id of its `tool_use`.")] = None
    is_error: Annotated[bool | None, doc("The `tool_result` is an error: the model reads `Error: `.")] = None
    content: Annotated[str | list[ContentPart] | None, doc("The text of a `tool_result`; default: none.")] = (
        None
    )


class SystemBlock(msgspec.Struct, kw_only=True):
    """A part of the system prompt."""

    type: Annotated[str, doc("`text`.")]
    text: Annotated[str, doc("The part's text.")]


class Message(msgspec.Struct, kw_only=True):
    """One message of a conversation."""

    role: Annotated[str, doc("`user`, `assistant` or `system`.")]
    content: Annotated[str | list[Block], doc("The message's text, or blocks.")]


class MessageTool(msgspec.Struct, kw_only=True):
    """A tool that the model may use."""

    type: Annotated[str | None, doc("`custom`, the default; others are not supported.")] = None
    name: Annotated[CallableName, doc("The tool's name.")]
    description: Annotated[str | None, doc("Tells the model what it does and when to use it.")] = None
    input_schema: Annotated[Object, doc("A JSON schema of the arguments.")] = absent()
    strict: Annotated[bool | None, doc("The arguments always satisfy the schema; default: false.")] = None


class MessageToolChoice(msgspec.Struct, kw_only=True):
    """Whether the answer uses tools."""

    type: Annotated[str, doc("`auto` (the default), `any`, `tool` or `none`.")]
    name: Annotated[str | None, doc("The tool to use, with the type `tool`.")] = None
    disable_parallel_tool_use: Annotated[
        bool | None, doc("Use at most one tool; default: false, unless a tool must be used.")
    ] = None


class Thinking(msgspec.Struct, kw_only=True):
    """Options of the model's reasoning."""

    type: Annotated[
        str,
        doc(
            "`enabled` or `disabled`: the variables `enable_thinking` and `thinking` of the chat template; "
            "`adaptive`: as the template has it."
        ),
    ]
    budget_tokens: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        doc("Most tokens of reasoning, less than `max_tokens`; after that many, the reasoning is ended."),
    ] = None


class OutputFormat(msgspec.Struct, kw_only=True):
    """The required format of the answer's text."""

    type: Annotated[str, doc("`json_schema`.")]
    schema: Annotated[Object, doc("The JSON schema.")] = absent()


class OutputConfig(msgspec.Struct, kw_only=True):
    """Options of the answer."""

    effort: Annotated[str | None, doc("Passed to the chat template as `reasoning_effort`.")] = None
    format: Annotated[OutputFormat | None, doc("Default: free text.")] = None


class MessageBody(SamplingBody, kw_only=True):
    """Answer a conversation, or count its tokens."""

    messages: Annotated[
        Annotated[list[Message], Meta(max_length=MAX_MESSAGES)],
        doc("The conversation so far; a last message of the assistant is continued."),
    ]
    max_tokens: Annotated[
        int | None, doc("Most tokens to generate; required, except for counting tokens.")
    ] = None
    system: Annotated[str | list[SystemBlock] | None, doc("The system prompt.")] = None
    temperature: Annotated[
        Annotated[float, Meta(ge=0, le=1)] | None, doc("0 (greedy) to 1; default: the model's, else 1.")
    ] = None
    top_k: Annotated[
        Annotated[int, Meta(ge=0)] | None, doc("Sample from this many of the likeliest; 0: from all.")
    ] = None
    stop_sequences: Annotated[
        Annotated[list[Word], Meta(max_length=MAX_STOPS)] | None, doc("Strings that end the answer.")
    ] = None
    tools: Annotated[
        Annotated[list[MessageTool], Meta(max_length=MAX_TOOLS)] | None,
        doc("Tools that the model may use."),
    ] = None
    tool_choice: Annotated[MessageToolChoice | None, doc("Whether the answer uses tools.")] = None
    thinking: Annotated[Thinking | None, doc("Options of the reasoning; default: the template's.")] = None
    output_config: Annotated[OutputConfig | None, doc("The answer's format, and its effort.")] = None
    chat_template_kwargs: TemplateVariables = absent()

    stop: Unsupported = absent()  # type: ignore[assignment]
    container: Unsupported = absent()
    mcp_servers: Unsupported = absent()
    n: Unsupported = absent()
    response_format: Unsupported = absent()
