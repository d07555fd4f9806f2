"""Requests of `/v1/messages` as Anthropic defines them. Each is converted to a chat's request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar

import msgspec
from msgspec import Meta, Raw

from protocol.errors import InvalidRequestError
from protocol.fields import doc
from router import openai_types as types
from router.decoding import decode_body, decode_object, refuse_unsupported
from router.reading.chats import ConvertedChat, ConvertedMessages, renamer
from router.reading.prepared import Prepared, ServedModel
from router.reading.request_reader import RequestReader


class ContentBlock(msgspec.Struct, kw_only=True):
    """A content block."""

    type: Annotated[
        str, doc("`text`, `tool_use`, `tool_result`, `thinking` or `redacted_thinking`, which is ignored.")
    ]
    text: Annotated[str | None, doc("The text of a `text` block.")] = None
    thinking: Annotated[str | None, doc("The reasoning; the chat template may show it.")] = None
    id: Annotated[str | None, doc("The id of a `tool_use`.")] = None
    name: Annotated[str | None, doc("The name of the used tool.")] = None
    input: Annotated[types.Object, doc("The arguments of a `tool_use`.")] = types.absent()
    tool_use_id: Annotated[str | None, doc("In a `tool_result`: the id of its `tool_use`.")] = None
    is_error: Annotated[bool | None, doc("The `tool_result` is an error: the model reads `Error: `.")] = None
    content: Annotated[str | list[types.ContentPart] | None, doc("The text of a `tool_result`.")] = None


class SystemBlock(msgspec.Struct, kw_only=True):
    """A part of the system prompt."""

    type: Annotated[str, doc("`text`.")]
    text: Annotated[str, doc("The part's text.")]


class Message(msgspec.Struct, kw_only=True):
    """One message of a conversation."""

    role: Annotated[str, doc("`user`, `assistant` or `system`.")]
    content: Annotated[str | list[ContentBlock], doc("The message's text, or blocks.")]


class MessageTool(msgspec.Struct, kw_only=True):
    """A tool that the model may use."""

    type: Annotated[str | None, doc("`custom`, the default; others are not supported.")] = None
    name: Annotated[types.CallableName, doc("The tool's name.")]
    description: Annotated[str | None, doc("Tells the model what it does and when to use it.")] = None
    input_schema: Annotated[types.Object, doc("A JSON schema of the arguments.")] = types.absent()
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
    schema: Annotated[types.Object, doc("The JSON schema.")] = types.absent()


class OutputConfig(msgspec.Struct, kw_only=True):
    """Options of the answer."""

    effort: Annotated[str | None, doc("Passed to the chat template as `reasoning_effort`.")] = None
    format: Annotated[OutputFormat | None, doc("Default: free text.")] = None


class MessageBody(types.SamplingBody, kw_only=True):
    """Answer a conversation, or count its tokens."""

    messages: Annotated[
        Annotated[list[Message], Meta(max_length=types.MAX_MESSAGES)],
        doc("The conversation so far; a last message of the assistant is continued."),
    ]
    max_tokens: Annotated[int | None, doc("Most tokens to generate; required, except to count.")] = None
    system: Annotated[str | list[SystemBlock] | None, doc("The system prompt.")] = None
    temperature: Annotated[
        Annotated[float, Meta(ge=0, le=1)] | None, doc("0 (greedy) to 1; default: the model's, else 1.")
    ] = None
    top_k: Annotated[
        Annotated[int, Meta(ge=0)] | None, doc("Sample from this many of the likeliest; 0: from all.")
    ] = None
    stop_sequences: Annotated[
        Annotated[list[types.Word], Meta(max_length=types.MAX_STOPS)] | None,
        doc("Strings that end the answer."),
    ] = None
    tools: Annotated[
        Annotated[list[MessageTool], Meta(max_length=types.MAX_TOOLS)] | None,
        doc("Tools that the model may use."),
    ] = None
    tool_choice: Annotated[MessageToolChoice | None, doc("Whether the answer uses tools.")] = None
    thinking: Annotated[Thinking | None, doc("Options of the reasoning; default: the template's.")] = None
    output_config: Annotated[OutputConfig | None, doc("The answer's format, and its effort.")] = None
    chat_template_kwargs: types.TemplateVariables = types.absent()

    stop: types.Unsupported = types.absent()  # type: ignore[assignment]
    container: types.Unsupported = types.absent()
    mcp_servers: types.Unsupported = types.absent()
    n: types.Unsupported = types.absent()
    response_format: types.Unsupported = types.absent()


own_field = renamer(
    {
        r"^stop$": "stop_sequences",
        r"^reasoning_effort$": "output_config.effort",
        r"^response_format(\.json_schema)?": "output_config.format",
        r"^(tools\[\d+\])\.function\.parameters": r"\1.input_schema",
        r"^(tools\[\d+\])\.function": r"\1",
    }
)
_SHARED = [name for name in types.SamplingBody.__struct_fields__ if name != "stop"]
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
    """Return the number of the prompt's tokens as JSON. Raises like `read_message`."""
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
    chat = types.ChatBody(
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


def _tool(tool: MessageTool, index: int) -> types.Tool:
    if tool.type not in (None, "custom"):
        raise InvalidRequestError(f"tools[{index}].type", f"must be 'custom', got {tool.type!r}")
    function = types.Function(
        name=tool.name, description=tool.description, parameters=tool.input_schema, strict=tool.strict
    )
    return types.Tool(type="function", function=function)


def _tool_choice(body: MessageBody) -> str | types.NamedTool | None:
    choice = body.tool_choice
    if choice is None:
        return None
    if choice.type == "tool":
        if choice.name is None:
            raise InvalidRequestError("tool_choice.name", "is required with the type 'tool'")
        return types.NamedTool(type="function", function=types.FunctionName(name=choice.name))
    if choice.type not in _CHOICES:
        raise InvalidRequestError(
            "tool_choice.type", f"must be 'auto', 'any', 'tool' or 'none', got {choice.type!r}"
        )
    return _CHOICES[choice.type]


def _response_format(wanted: OutputFormat) -> types.ResponseFormat:
    if wanted.type != "json_schema":
        raise InvalidRequestError("output_config.format.type", f"must be 'json_schema', got {wanted.type!r}")
    return types.ResponseFormat(type="json_schema", json_schema=types.JsonSchemaFormat(schema=wanted.schema))


def _variables(body: MessageBody) -> Raw:
    """Return the template's variables, which turn thinking on or off by the names that models use."""
    thinking = body.thinking
    if thinking is None or thinking.type == "adaptive":
        return body.chat_template_kwargs
    if thinking.type not in _THINKS:
        known = "'enabled', 'disabled' or 'adaptive'"
        raise InvalidRequestError("thinking.type", f"must be {known}, got {thinking.type!r}")
    thinks = _THINKS[thinking.type]
    own: dict[str, Any] = decode_object(body.chat_template_kwargs, "chat_template_kwargs") or {}
    return Raw(msgspec.json.encode({"enable_thinking": thinks, "thinking": thinks, **own}))


_ROLES = ("user", "assistant", "system")
_UNSEEN = "x-anthropic-billing-header"
"""Prefix of a client's block for Anthropic's billing. It differs in each request and would defeat caching."""


class MessageConversation(ConvertedMessages):
    """A collector of a chat's `messages`. Each tool result becomes a message of its own."""

    tool_names: ClassVar = {"tool_call_id": "tool_use_id"}
    call_names: ClassVar = {"arguments": "input"}

    def add_system(self, system: str | Sequence[SystemBlock]) -> None:
        """Append the system prompt. Raises `InvalidRequestError`."""
        if isinstance(system, str):
            self._append(types.ChatMessage(role="system", content=system), "system")
            return
        for index, block in enumerate(system):
            if block.type != "text":
                raise InvalidRequestError(f"system[{index}].type", f"must be 'text', got {block.type!r}")
        seen = [block for block in system if not block.text.startswith(_UNSEEN)]
        if seen:
            parts = [types.ContentPart(type="text", text=block.text) for block in seen]
            self._append(types.ChatMessage(role="system", content=parts), "system")

    def add(self, message: Message, at: str) -> None:
        """Append one message. Raises `InvalidRequestError`."""
        if message.role not in _ROLES:
            reason = f"must be one of {', '.join(_ROLES)}; got {message.role!r}"
            raise InvalidRequestError(f"{at}.role", reason)
        if isinstance(message.content, str):
            self._append(types.ChatMessage(role=message.role, content=message.content), at)
        elif message.role == "assistant":
            self._add_answer(message.content, at)
        else:
            self._add_blocks(message.role, message.content, at)

    @property
    def is_begun(self) -> bool:
        """Whether the answer must continue the last message."""
        last = self.messages[-1] if self.messages else None
        return last is not None and last.role == "assistant" and bool(last.content) and not last.tool_calls

    def _add_answer(self, blocks: Sequence[ContentBlock], at: str) -> None:
        message = self._append(types.ChatMessage(role="assistant", content=None), at)
        texts, thoughts = [], []
        for index, block in enumerate(blocks):
            place = f"{at}.content[{index}]"
            match block.type:
                case "text":
                    texts.append(_part(block, place))
                case "thinking":
                    thoughts.append(_required(block.thinking, f"{place}.thinking"))
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

    def _add_blocks(self, role: str, blocks: Sequence[ContentBlock], at: str) -> None:
        """Append the tool results, and the text before, between and after them."""
        texts: list[types.ContentPart] = []
        for index, block in enumerate(blocks):
            place = f"{at}.content[{index}]"
            if block.type == "text":
                texts.append(_part(block, place))
            elif block.type == "tool_result" and role == "user":
                if texts:
                    self._append(types.ChatMessage(role=role, content=texts), at)
                    texts = []
                answer = _result(block)
                result = types.ChatMessage(role="tool", content=answer, tool_call_id=block.tool_use_id)
                self._append(result, place)
            else:
                raise _unknown(place, "text or tool_result", block.type)
        if texts or not blocks:
            self._append(types.ChatMessage(role=role, content=texts), at)


def _result(block: ContentBlock) -> str | list[types.ContentPart]:
    """Return the content of a tool result, with its error: chat templates have no other place for it."""
    content = block.content or ""
    if not block.is_error:
        return content
    if isinstance(content, str):
        return f"Error: {content}"
    first, *others = content
    return [msgspec.structs.replace(first, text=f"Error: {first.text or ''}"), *others]


def _part(block: ContentBlock, at: str) -> types.ContentPart:
    return types.ContentPart(type="text", text=_required(block.text, f"{at}.text"))


def _call(block: ContentBlock, at: str) -> types.ToolCall:
    function = types.CalledFunction(
        name=_required(block.name, f"{at}.name"), arguments=bytes(block.input or b"{}").decode()
    )
    return types.ToolCall(id=_required(block.id, f"{at}.id"), function=function)


def _required(value: str | None, field: str) -> str:
    if value is None:
        raise InvalidRequestError(field, "is required")
    return value


def _unknown(at: str, known: str, got: str) -> InvalidRequestError:
    reason = "images are not supported" if got == "image" else f"must be {known}, got {got!r}"
    return InvalidRequestError(f"{at}.type", reason)
