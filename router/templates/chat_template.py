"""Renders chats with the model's Jinja template, in a sandbox, and finds the template's traits."""

from __future__ import annotations

import json
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

from protocol.errors import ConfigError, InvalidRequestError
from router.templates.messages import CallArguments, Content, text_of

_CONTINUE_MARK = "CONTINUE_FINAL_MESSAGE_TAG "


class _GenerationBlocks(Extension):
    """Accepts `{% generation %}`, which marks the assistant's part for training, and changes nothing."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


class ChatTemplate:
    """A compiled template. `special_tokens` (`bos_token`, ...) are variables in it."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlocks, "jinja2.ext.loopcontrols"]
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
        """Return the prompt. Raises `InvalidRequestError` that names the refused message."""
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
        """Return a message of a refused chat with which it is refused, and without which it is not."""
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
    """Append the mark at which a continued message's prompt is cut."""
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
    """The parts of a chat that a template shows, and the shape in which it needs them."""

    part_roles: frozenset[str] = frozenset()
    """Roles whose content the template shows only as a list of parts."""
    null: str | None = ""
    """The value for a content that is null: some templates need text, some check for none."""
    thought: str = "reasoning_content"
    """The field of the assistant's thinking."""
    shows_user: bool = True
    shows_tools: bool = True
    several_calls: bool = True
    """The template accepts more than one call in a message."""
    named_ids: bool = False
    """The template shows calls by their ids, which must contain the functions' names, as Kimi's do."""

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
        {**_said("assistant", ""), "tool_calls": [_call(_PROBE, _OTHER_PROBE, CallArguments())]},
    ]
    asked = [[_QUESTION], [_said("system", "?"), _QUESTION]]
    return msgspec.structs.replace(
        traits,
        shows_user=any(shows(traits, [*chat[:-1], _said("user", _PROBE)], _PROBE) for chat in asked),
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


def _said(role: str, text: str) -> Message:
    return {"role": role, "content": text}


def _calling(*names: str) -> Message:
    calls = [_call(call_id, name, CallArguments(of=name)) for call_id, name in zip(_IDS, names, strict=False)]
    return {"role": "assistant", "content": None, "tool_calls": calls}


def _call(call_id: str, name: str, arguments: CallArguments) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _result(text: str) -> Message:
    return {"name": "f", "tool_call_id": _IDS[0], **_said("tool", text)}


_QUESTION = _said("user", "?")
_CHATS: dict[str, list[Message]] = {
    "user": [_said("user", _PROBE)],
    "system": [_said("system", _PROBE), _QUESTION],
    "assistant": [_QUESTION, _said("assistant", _PROBE), _QUESTION],
    "tool": [_QUESTION, _calling("f"), _result(_PROBE)],
}
"""A chat for each role that has a message of that role."""
_TOOL = {
    "type": "function",
    "function": {"name": _PROBE, "description": "?", "parameters": {"type": "object", "properties": {}}},
}
