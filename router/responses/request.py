"""Requests of `/v1/responses`: each is converted to a chat, and its response repeats its fields."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Collection, Sequence
from typing import Any, ClassVar

import msgspec
from msgspec import Raw

from protocol.errors import InvalidRequestError
from protocol.sampling import ECHOED, SamplingParams
from router import openai_types as types
from router.answers.formats import Fields, OutputOptions
from router.decoding import decode_body, refuse_unsupported
from router.errors import ApiError
from router.reading.chats import ConvertedChat, ConvertedMessages, renamer
from router.reading.prepared import EarlierResponse, Prepared, PreparedResponse, ServedModel
from router.reading.request_reader import RequestReader
from router.responses.answer import ResponseAnswer
from router.responses.body import Item, ItemPart, ResponseBody, ResponseTool, TextFormat
from router.responses.store import ResponseStore, StoredResponse
from router.text.tokenizer import Tokenizer

own_field = renamer(
    {
        r"^messages$": "input",
        r"^max_completion_tokens$": "max_output_tokens",
        r"^reasoning_effort$": "reasoning.effort",
        r"^response_format(\.json_schema)?": "text.format",
        r"^(tools\[\d+\])\.function": r"\1",
    }
)
_IN_VAIN = "reasoning.encrypted_content"


def converted_chat(body: ResponseBody, earlier: Sequence[Item]) -> tuple[ConvertedChat, list[Item]]:
    """Convert a request that continues `earlier` items. Return the chat and all items."""
    refuse_unsupported(body)
    _check_options(body)
    if body.input is None:
        raise InvalidRequestError("input", "is required")
    new = [Item(role="user", content=body.input)] if isinstance(body.input, str) else body.input
    answered = {item.call_id for item in [*earlier, *new] if item.type == "function_call_output"}
    conversation = Conversation(answered)
    if body.instructions is not None:
        conversation.add_instructions(body.instructions)
    conversation.add_items(earlier, "previous_response_id")
    conversation.add_items(new, "input")
    text, reasoning = body.text, body.reasoning
    chat = types.ChatBody(
        **{name: getattr(body, name) for name in types.SamplingBody.__struct_fields__},
        messages=conversation.messages,
        max_completion_tokens=body.max_output_tokens,
        tools=[_tool(tool, index) for index, tool in enumerate(body.tools or ())] or None,
        tool_choice=_tool_choice(body),
        parallel_tool_calls=body.parallel_tool_calls,
        response_format=None if text is None or text.format is None else _response_format(text.format),
        reasoning_effort=None if reasoning is None else reasoning.effort,
        thinking_token_budget=body.thinking_token_budget,
        chat_template_kwargs=body.chat_template_kwargs,
    )
    return ConvertedChat(chat, conversation, own_field), [*earlier, *new]


def echoed_fields(body: ResponseBody, params: SamplingParams) -> dict[str, Any]:
    """Return the fields that the response repeats, with the parameters that the request runs with."""
    text, reasoning = body.text, body.reasoning
    return {
        **{name: getattr(params, name) for name in ECHOED},
        "background": False,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": None,
        "metadata": body.metadata or {},
        "parallel_tool_calls": _tool_choice(body) in (None, "auto", "none")
        if body.parallel_tool_calls is None
        else body.parallel_tool_calls,
        "previous_response_id": body.previous_response_id,
        "reasoning": {"effort": reasoning and reasoning.effort, "summary": None},
        "text": {"format": _echoed_format(text.format if text is not None else None)},
        "tool_choice": body.tool_choice or "auto",
        "tools": [
            {
                "type": "function",
                "name": tool.name,
                "description": tool.description,
                "parameters": tool.parameters if bytes(tool.parameters) else None,
                "strict": bool(tool.strict),
            }
            for tool in body.tools or ()
        ],
        "top_logprobs": 0,
        "truncation": "disabled",
        "user": body.user,
    }


def _check_options(body: ResponseBody) -> None:
    for index, name in enumerate(body.include or ()):
        if name != _IN_VAIN:
            raise InvalidRequestError(f"include[{index}]", f"only {_IN_VAIN!r} is supported, got {name!r}")
    if body.text is not None and body.text.verbosity not in (None, "medium"):
        raise InvalidRequestError("text.verbosity", f"only 'medium', got {body.text.verbosity!r}")
    if body.reasoning is not None and body.reasoning.summary not in (None, "auto"):
        raise InvalidRequestError("reasoning.summary", f"only 'auto', got {body.reasoning.summary!r}")


def _tool(tool: ResponseTool, index: int) -> types.Tool:
    if tool.type != "function":
        raise InvalidRequestError(f"tools[{index}].type", f"must be 'function', got {tool.type!r}")
    if tool.name is None:
        raise InvalidRequestError(f"tools[{index}].name", "is required")
    function = types.Function(
        name=tool.name, description=tool.description, parameters=tool.parameters, strict=tool.strict
    )
    return types.Tool(type="function", function=function)


def _tool_choice(body: ResponseBody) -> str | types.NamedTool | None:
    asked = body.tool_choice
    if asked is None or isinstance(asked, str):
        return asked
    if asked.type != "function":
        raise InvalidRequestError("tool_choice.type", f"must be 'function', got {asked.type!r}")
    return types.NamedTool(type="function", function=asked)


def _response_format(wanted: TextFormat) -> types.ResponseFormat:
    if wanted.type not in ("text", "json_object", "json_schema"):
        kinds = "text, json_object or json_schema"
        raise InvalidRequestError("text.format.type", f"must be {kinds}, got {wanted.type!r}")
    schema = types.JsonSchemaFormat(schema=wanted.schema) if wanted.type == "json_schema" else None
    return types.ResponseFormat(type=wanted.type, json_schema=schema)


def _echoed_format(wanted: TextFormat | None) -> dict[str, Any]:
    if wanted is None:
        return {"type": "text"}
    fields = msgspec.structs.asdict(wanted)
    return {name: value for name, value in fields.items() if value not in (None, msgspec.Raw())}


_ROLES = ("user", "assistant", "system", "developer")
_TEXT_PARTS = ("input_text", "output_text", "reasoning_text", "summary_text", "text")


class Conversation(ConvertedMessages):
    """The `messages` of a conversation's items. Adjacent reasoning, text and calls form one message."""

    tool_names: ClassVar = {"tool_call_id": "call_id", "content": "output"}

    def __init__(self, answered: Collection[str | None]) -> None:
        """Initialize. `answered`: ids of calls with an output. Other incomplete calls are omitted."""
        super().__init__()
        self._answered = answered

    def add_instructions(self, text: str) -> None:
        self._append(types.ChatMessage(role="system", content=text), "instructions")

    def add_items(self, items: Sequence[Item], field: str) -> None:
        """Append the messages of the items. Raises `InvalidRequestError`."""
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
                    result = types.ChatMessage(role="tool", content=content, tool_call_id=item.call_id)
                    self._append(result, at)
                case other:
                    kinds = "message, reasoning, function_call or function_call_output"
                    raise InvalidRequestError(f"{at}.type", f"must be {kinds}, got {other!r}")

    def _assistant(self, at: str, is_first: bool) -> types.ChatMessage:
        """Return the assistant's last message; a new one if `is_first` and it already has text or calls."""
        last = self.messages[-1] if self.messages else None
        if last is None or last.role != "assistant" or (is_first and (last.content or last.tool_calls)):
            last = self._append(types.ChatMessage(role="assistant", content=""), at)
        return last

    def _add_message(self, item: Item, at: str) -> None:
        if item.role not in _ROLES:
            raise InvalidRequestError(f"{at}.role", f"must be one of {', '.join(_ROLES)}; got {item.role!r}")
        content = _parts(item.content, f"{at}.content")
        if item.role == "assistant":
            self._assistant(at, True).content = content
        else:
            self._append(types.ChatMessage(role=item.role, content=content), at)

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
        function = types.CalledFunction(name=item.name or "", arguments=item.arguments or "")
        self._append_call(types.ToolCall(id=item.call_id or "", function=function), at)
        message.content = message.content or None


def _parts(content: str | list[ItemPart] | None, field: str) -> str | list[types.ContentPart]:
    if content is None:
        raise InvalidRequestError(field, "is required")
    if isinstance(content, str):
        return content
    return [_part(part, f"{field}[{index}].") for index, part in enumerate(content)]


def _part(part: ItemPart, at: str) -> types.ContentPart:
    if part.type == "refusal":
        return types.ContentPart(type="text", text=part.refusal)
    if part.type not in _TEXT_PARTS:
        raise InvalidRequestError(f"{at}type", f"only text is supported, got {part.type!r}")
    return types.ContentPart(type="text", text=part.text)


_NOTHING_KEPT = (
    "nothing is kept here (--max-stored-responses is 0, or several routers without --response-store)"
)


def read_response(
    reader: RequestReader, raw: bytes, model: ServedModel, earlier: bytes | None = None
) -> Prepared | EarlierResponse:
    """Read a body, or return the `EarlierResponse` whose items are needed first. Raises `ApiError` or
    `InvalidRequestError` that names the request's field.
    """
    body = decode_body(raw, ResponseBody)
    if body.previous_response_id is not None and earlier is None:
        return EarlierResponse(body.previous_response_id)
    chat, items = converted_chat(body, msgspec.json.decode(earlier or b"[]", type=list[Item]))
    prepared = chat.read(reader.chat_of, model)
    fields = echoed_fields(body, prepared.params)
    echoed = {name: msgspec.json.encode(value) for name, value in fields.items()}
    response = PreparedResponse(echoed, msgspec.json.encode(items), body.store is not False)
    return msgspec.structs.replace(prepared, response=response)


async def earlier_items(store: ResponseStore | None, response_id: str, owner: str) -> bytes:
    """Return the items of an earlier response of the owner. Raises `ApiError` or `InvalidRequestError`."""
    if store is None:
        raise InvalidRequestError("previous_response_id", _NOTHING_KEPT)
    found = await asyncio.to_thread(store.get, response_id, owner)
    if found is None:
        name = "previous_response_id"
        message = f"{name}: there is no response {response_id!r}, or no more"
        raise ApiError(400, message, param=name, code="previous_response_not_found")
    return found.items


def response_answer(
    store: ResponseStore | None,
    prepared: Prepared,
    owner: str,
    tokenizer: Tokenizer,
    model: str,
    request_id: str,
    options: OutputOptions,
) -> ResponseAnswer:
    """Return the writer of a response. `store` None: responses are not kept."""
    response, response_id = prepared.response, f"resp_{secrets.token_hex(16)}"
    assert response is not None
    earlier, keeps = response.items[1:-1], store is not None and response.is_stored

    def keep(body: Fields) -> bool:
        assert store is not None
        answered = [msgspec.json.encode(item) for item in body["output"]]
        items = b"[%b]" % b",".join([part for part in (earlier, *answered) if part])
        return store.put(StoredResponse(response_id, owner, msgspec.json.encode(body), items))

    echoed = {name: Raw(value) for name, value in response.echoed.items()}
    fields = {"model": model, **echoed, "store": keeps}
    return ResponseAnswer(response_id, tokenizer, options, fields, keep if keeps else None)
