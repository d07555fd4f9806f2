"""Chat messages to a prompt, by the model's Jinja template in a sandbox."""

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
from router.messages import CallArguments

DEFAULT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
)
"""For models without a template of their own."""

_PROBED = "PROBED_FUNCTION"
_PROBED_CALL = {"name": _PROBED, "arguments": CallArguments()}
_PROBE: list[dict[str, Any]] = [
    {"role": "user", "content": "?"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "abcdefghi", "type": "function", "function": _PROBED_CALL}],
    },
]
_CONTINUE_MARK = "CONTINUE_FINAL_MESSAGE_TAG "


class _GenerationBlocks(Extension):
    """`{% generation %}` marks the assistant's part for training; here it changes nothing."""

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
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda layout: datetime.now().strftime(layout)
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise ConfigError(f"the chat template does not compile: {error}") from error
        self.source = source
        self._special_tokens = dict(special_tokens)
        self._null = None if self._shows_calls_beside_null() else ""
        """What the template gets for a content that is null: some want text, some look for none."""

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt's text. Raises `InvalidRequestError` with the template's own complaint."""
        chat = [dict(message) for message in messages]
        for message in chat:
            if message["content"] is None:
                message["content"] = self._null
        if continue_final_message:
            chat[-1]["content"] = (chat[-1]["content"] or "") + _CONTINUE_MARK
        try:
            text = self._text(chat, add_generation_prompt, variables or {})
        except Exception as error:  # a template can raise anything
            raise InvalidRequestError("messages", f"the chat template refused them: {error}") from error
        return _cut_at_mark(text) if continue_final_message else text

    def _text(self, chat: Sequence[Mapping[str, Any]], generates: bool, variables: Mapping[str, Any]) -> str:
        names = {"tools": None, "documents": None, **self._special_tokens, **variables}
        return self._template.render(names, messages=chat, add_generation_prompt=generates)

    def _shows_calls_beside_null(self) -> bool:
        try:
            return _PROBED in self._text(_PROBE, False, {})
        except Exception:
            return False


def _cut_at_mark(text: str) -> str:
    mark = text.rfind(_CONTINUE_MARK.strip())
    if mark < 0:
        raise InvalidRequestError(
            "continue_final_message", "the chat template does not render the final message"
        )
    if text[mark : mark + len(_CONTINUE_MARK)] == _CONTINUE_MARK:
        return text[:mark]
    return text[:mark].rstrip()
