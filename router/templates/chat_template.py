"""Renders chat messages as a prompt with the model's Jinja template, in a sandbox."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import partial
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from protocol.errors import ConfigError, InvalidRequestError
from router.templates.messages import Content
from router.templates.template_traits import TemplateTraits, template_traits

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
        """Return the prompt's text. Raises `InvalidRequestError` with the message that the template refuses
        and its own reason.
        """
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
