"""The model's Jinja chat template: checks of a chat's messages, and rendering in a sandbox by its traits."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from functools import partial
from typing import Any, TypeAlias

import jinja2
import msgspec
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from pydantic_core import from_json

from protocol.errors import ConfigError, InvalidRequestError
from router.decoding import refuse_unsupported
from router.openai_types import MAX_ARGUMENT_BYTES, ChatMessage, ContentPart, ToolCall

Content: TypeAlias = str | list[dict[str, str]] | None
"""Text or parts of a message, as the client sent them."""

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}


def text_of(content: Content) -> str:
    """Return the content as one text."""
    if isinstance(content, list):
        return "\n".join(part["text"] for part in content)
    return content or ""


def plain_messages(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """Return the messages as the chat template reads them. Raises `InvalidRequestError`."""
    if not messages:
        raise InvalidRequestError("messages", "must not be empty")
    calls: dict[str, str] = {}
    """Names of the called functions by call id."""
    return [_plain(message, f"messages[{index}].", calls) for index, message in enumerate(messages)]


def _plain(message: ChatMessage, at: str, calls: dict[str, str]) -> dict[str, Any]:
    if message.role not in _ROLES:
        raise InvalidRequestError(f"{at}role", f"must be one of {', '.join(_ROLES)}; got {message.role!r}")
    refuse_unsupported(message, at)
    is_assistant = message.role == "assistant"
    if message.tool_calls and not is_assistant:
        raise InvalidRequestError(f"{at}tool_calls", "only allowed in messages of the assistant")
    has_thought = message.reasoning_content is not None and is_assistant
    if message.content is None and not message.tool_calls and not has_thought:
        raise InvalidRequestError(f"{at}content", "is required")
    fields: dict[str, Any] = {"role": _ROLES[message.role], "content": plain_content(message.content, at)}
    if message.name is not None:
        fields["name"] = message.name
    if has_thought:
        fields["reasoning_content"] = message.reasoning_content
    if message.tool_calls:
        made = enumerate(message.tool_calls)
        fields["tool_calls"] = [_plain_call(call, f"{at}tool_calls[{index}].") for index, call in made]
        calls.update((call.id, call.function.name) for call in message.tool_calls)
    if message.role == "tool":
        call_id = message.tool_call_id
        if call_id not in calls:
            reason = "is required" if call_id is None else f"no message before it has the call {call_id!r}"
            raise InvalidRequestError(f"{at}tool_call_id", reason)
        fields = {"name": calls[call_id], "tool_call_id": call_id, **fields}
    return fields


def _plain_call(call: ToolCall, at: str) -> dict[str, Any]:
    if call.type != "function":
        raise InvalidRequestError(f"{at}type", f"must be 'function', got {call.type!r}")
    arguments = call_arguments(call.function.arguments, f"{at}function.arguments")
    function = {"name": call.function.name, "arguments": arguments}
    return {"id": call.id, "type": "function", "function": function}


def plain_content(content: str | list[ContentPart] | None, at: str) -> Content:
    """Return the content as the chat template reads it. Raises `InvalidRequestError`."""
    if content is None or isinstance(content, str):
        return content
    parts = []
    for index, part in enumerate(content):
        if part.type != "text":
            raise InvalidRequestError(
                f"{at}content[{index}].type", f"only 'text' parts are supported, got {part.type!r}"
            )
        if part.text is None:
            raise InvalidRequestError(f"{at}content[{index}].text", "is required")
        parts.append({"type": "text", "text": part.text})
    return parts


class CallArguments(dict[str, Any]):
    """A call's arguments: a mapping for templates that read it, JSON text for templates that print it."""

    def __str__(self) -> str:
        return json.dumps(self, ensure_ascii=False)

    def __add__(self, text: str) -> str:
        return str(self) + text

    def __radd__(self, text: str) -> str:
        return text + str(self)


def call_arguments(text: str, field: str) -> CallArguments:
    """Parse a request's arguments. Raises `InvalidRequestError` for a text that is too long."""
    if len(text.encode(errors="replace")) > MAX_ARGUMENT_BYTES:
        raise InvalidRequestError(field, f"at most {MAX_ARGUMENT_BYTES} bytes of JSON")
    return parsed_arguments(text)


def parsed_arguments(text: str) -> CallArguments:
    """Parse arguments. An object that was cut off is closed; other text becomes the argument `arguments`."""
    if not text.strip():
        return CallArguments()
    try:
        found = json.loads(text, strict=False)
    except (ValueError, RecursionError):
        found = _closed(text)
    if found is None:
        return CallArguments()
    return _without_surrogates(found if isinstance(found, dict) else {"arguments": found})


_STRING = re.compile(r'"(?:[^"\\]|\\.)*+"?', re.DOTALL)
_ESCAPES = {code: f"\\u{code:04x}" for code in range(32)}
"""Escapes of control characters, which models also write as they are."""


def _closed(text: str) -> Any:
    """Return the value of JSON that was cut off, or the text if it is no beginning of JSON."""
    escaped = _STRING.sub(lambda string: string[0].translate(_ESCAPES), text)
    try:
        from_json(escaped)
    except ValueError as error:
        if str(error).startswith("EOF"):
            return from_json(escaped, allow_partial="trailing-strings")
    return text


def _without_surrogates(found: dict[str, Any]) -> CallArguments:
    """Replace lone surrogates, which JSON escapes can contain but UTF-8 text cannot."""
    written = json.dumps(found, ensure_ascii=False)
    try:
        written.encode()
    except UnicodeEncodeError:
        found = json.loads(written.encode(errors="replace"))
    return CallArguments(found)


_CONTINUE_MARK = "CONTINUE_FINAL_MESSAGE_TAG "


class _GenerationBlocks(Extension):
    """A Jinja extension that accepts `{% generation %}`, which marks the assistant's part for training."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


class ChatTemplate:
    """A compiled template. `special_tokens` (`bos_token`, ...) are variables in it."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        extensions = [_GenerationBlocks, "jinja2.ext.loopcontrols"]
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=extensions
        )
        environment.filters["tojson"] = partial(json.dumps, ensure_ascii=False)
        environment.filters["fromjson"] = json.loads
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda layout: datetime.now().strftime(layout)
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise ConfigError(f"the chat template does not compile: {error}") from error
        self.source = source
        self._special_tokens = dict(special_tokens)
        self.traits: TemplateTraits = template_traits(lambda chat, names: self._text(chat, False, names))

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Return the prompt. Raises `InvalidRequestError` that names the message to blame."""
        chat = self.traits.chat(messages)
        if continue_final_message:
            chat[-1]["content"] = _marked(chat[-1]["content"])
        try:
            text = self._text(chat, add_generation_prompt, variables or {})
        except Exception as error:  # a template can raise anything
            index = self._first_refused(chat, add_generation_prompt, variables or {})
            raise InvalidRequestError(
                f"messages[{index}]", f"the chat template refused it: {error}"
            ) from error
        return _cut_at_mark(text) if continue_final_message else text

    def _first_refused(
        self, chat: Sequence[Mapping[str, Any]], generates: bool, variables: Mapping[str, Any]
    ) -> int:
        """Return the index of a message with which the messages up to it are refused, but not before it."""
        taken, refused = 0, len(chat)
        while refused - taken > 1:
            middle = (taken + refused) // 2
            try:
                self._text(chat[:middle], generates, variables)
            except Exception:  # a template can raise anything
                refused = middle
            else:
                taken = middle
        return taken

    def _text(self, chat: Sequence[Mapping[str, Any]], generates: bool, variables: Mapping[str, Any]) -> str:
        names = {"tools": None, "documents": None, **self._special_tokens, **variables}
        return self._template.render(names, messages=chat, add_generation_prompt=generates)


def _marked(content: Content) -> Content:
    """Append a mark; the prompt of a continued message is cut there."""
    if not isinstance(content, list):
        return (content or "") + _CONTINUE_MARK
    *others, last = content or [{"type": "text", "text": ""}]
    return [*others, {**last, "text": last["text"] + _CONTINUE_MARK}]


def _cut_at_mark(text: str) -> str:
    mark = text.rfind(_CONTINUE_MARK.strip())
    if mark < 0:
        raise InvalidRequestError(
            "continue_final_message", "the chat template does not render the final message"
        )
    if text[mark : mark + len(_CONTINUE_MARK)] == _CONTINUE_MARK:
        return text[:mark]
    return text[:mark].rstrip()


Message: TypeAlias = Mapping[str, Any]
Render: TypeAlias = Callable[[Sequence[Message], Mapping[str, Any]], str]

_PROBE, _OTHER_PROBE = "PROBED_TEXT", "OTHER_PROBED"
_IDS = ("abcdefghi", "abcdefghj")


class TemplateTraits(msgspec.Struct, frozen=True, kw_only=True):
    """The parts of a chat that a template renders, and the message shapes that it needs."""

    part_roles: frozenset[str] = frozenset()
    """Roles whose content the template renders only as a list of parts."""
    null: str | None = ""
    """Value of a content that is null: some templates need text, some test for none."""
    thought: str = "reasoning_content"
    """Name of the field with the assistant's thinking."""
    shows_user: bool = True
    shows_tools: bool = True
    several_calls: bool = True
    """Whether the template accepts more than one call in a message."""
    named_ids: bool = False
    """Whether the template renders calls by ids that must contain the functions' names, like Kimi's."""

    def chat(self, messages: Sequence[Message]) -> list[dict[str, Any]]:
        """Return the messages in the shape that the template needs."""
        return [self.shaped(each) for each in (_with_named_ids(messages) if self.named_ids else messages)]

    def shaped(self, message: Message) -> dict[str, Any]:
        """Return the message in the shape that the template needs."""
        content: Content = self.null if message["content"] is None else message["content"]
        if message["role"] not in self.part_roles:
            content = text_of(content) if isinstance(content, list) else content
        elif isinstance(content, str):
            content = [{"type": "text", "text": content}]
        fields = {**message, "content": content}
        if self.thought != "reasoning_content" and "reasoning_content" in fields:
            thought = fields.pop("reasoning_content")
            # gpt-oss refuses a message with content, thinking and calls
            if not content or "tool_calls" not in fields:
                fields[self.thought] = thought
        return fields


def template_traits(render: Render) -> TemplateTraits:
    """Return the traits of the template that `render` renders."""

    def shows(traits: TemplateTraits, chat: Sequence[Message], *texts: str, **variables: Any) -> bool:
        try:
            shown = render([traits.shaped(message) for message in chat], variables)
        except Exception:  # a template can raise anything
            return False
        return all(text in shown for text in texts)

    traits = TemplateTraits()
    for role, chat in _CHATS.items():
        parts = msgspec.structs.replace(traits, part_roles=traits.part_roles | {role})
        if not shows(traits, chat, _PROBE) and shows(parts, chat, _PROBE):
            traits = parts
    with_null = msgspec.structs.replace(traits, null=None)
    one, two = [_QUESTION, _calling(_PROBE)], [_QUESTION, _calling(_PROBE, _OTHER_PROBE)]
    if shows(with_null, one, _PROBE):
        traits = with_null
    thinking = [_QUESTION, {**_calling("f"), "reasoning_content": _PROBE}, _result("!")]
    renamed = msgspec.structs.replace(traits, thought="thinking")
    if not shows(traits, thinking, _PROBE) and shows(renamed, thinking, _PROBE):
        traits = renamed
    by_id = [
        _QUESTION,
        {**_message("assistant", ""), "tool_calls": [_call(_PROBE, _OTHER_PROBE, CallArguments())]},
    ]
    asked = [[_QUESTION], [_message("system", "?"), _QUESTION]]
    return msgspec.structs.replace(
        traits,
        shows_user=any(shows(traits, [*chat[:-1], _message("user", _PROBE)], _PROBE) for chat in asked),
        shows_tools=any(shows(traits, chat, _PROBE, tools=[_TOOL]) for chat in asked),
        several_calls=shows(traits, two, _PROBE, _OTHER_PROBE) or not shows(traits, one, _PROBE),
        named_ids=shows(traits, by_id, _PROBE) and not shows(traits, by_id, _OTHER_PROBE),
    )


def _with_named_ids(messages: Sequence[Message]) -> Iterator[Message]:
    """Yield the messages with Kimi's ids, `functions.name:number`, for all calls and their results."""
    ids: dict[str, str] = {}
    for message in messages:
        calls = []
        for call in message.get("tool_calls", ()):
            head = f"functions.{call['function']['name']}:"
            ids[call["id"]] = call["id"] if call["id"].startswith(head) else f"{head}{len(ids)}"
            calls.append({**call, "id": ids[call["id"]]})
        if calls:
            yield {**message, "tool_calls": calls}
        elif "tool_call_id" in message:
            yield {**message, "tool_call_id": ids.get(message["tool_call_id"], message["tool_call_id"])}
        else:
            yield message


def _message(role: str, text: str) -> Message:
    return {"role": role, "content": text}


def _calling(*names: str) -> Message:
    calls = [_call(call_id, name, CallArguments(of=name)) for call_id, name in zip(_IDS, names, strict=False)]
    return {"role": "assistant", "content": None, "tool_calls": calls}


def _call(call_id: str, name: str, arguments: CallArguments) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _result(text: str) -> Message:
    return {"name": "f", "tool_call_id": _IDS[0], **_message("tool", text)}


_QUESTION = _message("user", "?")
_CHATS: dict[str, list[Message]] = {
    "user": [_message("user", _PROBE)],
    "system": [_message("system", _PROBE), _QUESTION],
    "assistant": [_QUESTION, _message("assistant", _PROBE), _QUESTION],
    "tool": [_QUESTION, _calling("f"), _result(_PROBE)],
}
"""A chat by role, which contains a message of that role."""
_TOOL = {
    "type": "function",
    "function": {"name": _PROBE, "description": "?", "parameters": {"type": "object", "properties": {}}},
}
