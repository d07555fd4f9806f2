"""The request bodies of `/v1/responses`, as OpenAI defines them."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from protocol.fields import doc
from router import openai_types as types


class ItemPart(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A part of an item's text."""

    type: Annotated[
        str, doc("`input_text`, `output_text`, `reasoning_text`, `summary_text`, `text` or `refusal`.")
    ]
    text: Annotated[str | None, doc("The part's text.")] = None
    refusal: Annotated[str | None, doc("The text of a `refusal`.")] = None


ItemText = str | list[ItemPart]


class Item(msgspec.Struct, kw_only=True, omit_defaults=True):
    """An item of a conversation: a message, reasoning, a call, or its output."""

    type: Annotated[str, doc("`message`, `reasoning`, `function_call`, `function_call_output`.")] = "message"
    role: Annotated[str | None, doc("A message's role: `user`, `assistant`, `system` or `developer`.")] = None
    content: Annotated[ItemText | None, doc("The text of a message or of reasoning.")] = None
    summary: Annotated[list[ItemPart] | None, doc("Of reasoning; read only without `content`.")] = None
    call_id: Annotated[str | None, doc("The id of a call, or of an output's call.")] = None
    name: Annotated[str | None, doc("The name of the called function.")] = None
    arguments: Annotated[str | None, doc("The arguments of a call, an object as JSON text.")] = None
    output: Annotated[ItemText | None, doc("The function's result.")] = None
    status: Annotated[str | None, doc("An `incomplete` call is ignored unless it has an output.")] = None


class ResponseTool(msgspec.Struct, kw_only=True):
    """A function that the model may call."""

    type: Annotated[str, doc("`function`; others are not supported.")]
    name: Annotated[types.CallableName | None, doc("The function's name.")] = None
    description: Annotated[str | None, doc("Tells the model what it does and when to call it.")] = None
    parameters: Annotated[types.Object, doc("A JSON schema of the arguments.")] = types.absent()
    strict: Annotated[bool | None, doc("The arguments always satisfy the schema; default: false.")] = None


class ToolName(types.FunctionName, kw_only=True):
    """The function that the answer is to call."""

    type: Annotated[str, doc("`function`.")]


class TextFormat(msgspec.Struct, kw_only=True):
    """The required format of the answer's text."""

    type: Annotated[str, doc("`text`, `json_object` or `json_schema`.")]
    schema: Annotated[types.Object, doc("With the type `json_schema`.")] = types.absent()
    name: Annotated[str | None, doc("Repeated in the response.")] = None
    description: Annotated[str | None, doc("Repeated in the response.")] = None
    strict: Annotated[bool | None, doc("Repeated in the response; the answer always fits.")] = None


class TextOptions(msgspec.Struct, kw_only=True):
    """Options of the answer's text."""

    format: Annotated[TextFormat | None, doc("Default: free text.")] = None
    verbosity: Annotated[str | None, doc("Only `medium`, which changes nothing.")] = None


class ReasoningOptions(msgspec.Struct, kw_only=True):
    """Options of the model's reasoning."""

    effort: Annotated[str | None, doc("Passed to the chat template.")] = None
    summary: Annotated[str | None, doc("Only `auto`: reasoning items have the whole text.")] = None


class ResponseBody(types.SamplingBody, kw_only=True):
    """Answer a conversation's items."""

    input: Annotated[
        str | Annotated[list[Item], Meta(max_length=types.MAX_MESSAGES)] | None,
        doc("The user's text, or items; required."),
    ] = None
    instructions: Annotated[str | None, doc("A system message for this answer alone.")] = None
    previous_response_id: Annotated[str | None, doc("The response that this one continues.")] = None
    store: Annotated[bool | None, doc("Store the response, for others to continue it; default: true.")] = None
    max_output_tokens: Annotated[int | None, doc("Most tokens to generate; default: all that fit.")] = None
    tools: Annotated[
        Annotated[list[ResponseTool], Meta(max_length=types.MAX_TOOLS)] | None,
        doc("Functions that the model may call."),
    ] = None
    tool_choice: Annotated[
        str | ToolName | None, doc("`auto` (the default), `none`, `required`, or the function to call.")
    ] = None
    parallel_tool_calls: types.ParallelCalls = None
    text: Annotated[TextOptions | None, doc("The required format of the answer's text.")] = None
    reasoning: Annotated[ReasoningOptions | None, doc("Options of the model's reasoning.")] = None
    include: Annotated[
        list[str] | None, doc("Only `reasoning.encrypted_content`: reasoning items have the text itself.")
    ] = None
    metadata: Annotated[types.Metadata | None, doc("Repeated in the response.")] = None  # type: ignore[assignment]
    user: Annotated[str | None, doc("Repeated in the response.")] = None
    thinking_token_budget: types.ThinkingTokens = None
    chat_template_kwargs: types.TemplateVariables = types.absent()

    background: types.Unsupported = types.absent()
    context_management: types.Unsupported = types.absent()
    conversation: types.Unsupported = types.absent()
    max_tool_calls: types.Unsupported = types.absent()
    moderation: types.Unsupported = types.absent()
    prompt: types.Unsupported = types.absent()
    top_logprobs: types.Unsupported = types.absent()
    truncation: types.Unsupported = types.absent()
    max_tokens: types.Unsupported = types.absent()
    messages: types.Unsupported = types.absent()
    n: types.Unsupported = types.absent()
    response_format: types.Unsupported = types.absent()
