"""Answers of `/v1/chat/completions` that have reasoning and tool calls beside their content."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import msgspec

from router.choice import Choice, Delta
from router.formats import ChatFormat, Format, OutputOptions, usage
from router.parsing.answer import Arguments, Call, Content, Reasoning
from router.parsing.formats import AnswerParser, Parsing
from router.tokenizer import Tokenizer

_json = msgspec.json.Encoder().encode

SHORT_ID_CHARACTERS = 9


def chat_format(tokenizer: Tokenizer, model: str, request_id: str, options: OutputOptions) -> Format:
    """Writes a chat's answer."""
    if options.parsing is None:
        return ChatFormat(tokenizer, model, request_id, options)
    return ParsedChatFormat(tokenizer, model, request_id, options, options.parsing)


class _Calls:
    """One choice's answer, and the calls in it so far."""

    def __init__(self, parsing: Parsing, seed: str) -> None:
        self._parser = AnswerParser(parsing)
        self._parsing = parsing
        self._seed = seed
        self.number = 0

    def push(self, choice: Choice, delta: Delta) -> dict[str, Any]:
        """What is new, as a message's fields: `reasoning_content`, `content`, `tool_calls`."""
        parts = self._parser.push(delta.text)
        if choice.finish_reason is not None:
            parts += self._parser.finish()
        fields: dict[str, Any] = {}
        for part in parts:
            if isinstance(part, Content):
                fields["content"] = fields.get("content", "") + part.text
            elif isinstance(part, Reasoning):
                fields["reasoning_content"] = fields.get("reasoning_content", "") + part.text
            elif not self._is_left_out(part):
                _add(fields.setdefault("tool_calls", []), self.number - 1, self._id(), part)
        return fields

    def _is_left_out(self, part: Call | Arguments) -> bool:
        self.number += isinstance(part, Call)
        return self._parsing.one_call and self.number > 1

    def _id(self) -> str:
        """The same for the same call of the same request."""
        digest = hashlib.blake2b(f"{self._seed}-{self.number}".encode(), digest_size=12).hexdigest()
        tools = self._parsing.tools
        return digest[:SHORT_ID_CHARACTERS] if tools is not None and tools.short_ids else f"call_{digest}"


def _add(calls: list[dict[str, Any]], index: int, call_id: str, part: Call | Arguments) -> None:
    if isinstance(part, Call):
        function = {"name": part.name, "arguments": ""}
        calls.append({"index": index, "id": call_id, "type": "function", "function": function})
        return
    if not calls:
        calls.append({"index": index, "function": {"arguments": ""}})
    calls[-1]["function"]["arguments"] += part.text


class ParsedChatFormat(ChatFormat):
    """With what the parsers find in each choice's text."""

    def __init__(
        self, tokenizer: Tokenizer, model: str, request_id: str, options: OutputOptions, parsing: Parsing
    ) -> None:
        super().__init__(tokenizer, model, request_id, options)
        self._parsing = parsing
        self._request_id = request_id
        self._calls: dict[int, _Calls] = {}

    def chunk(self, choice: Choice) -> bytes:
        delta, first = choice.take(), choice.index not in self._calls
        fields = self._push(choice, delta)
        start = self._role(choice) if first else b""
        if self._options.only_text and not fields and choice.finish_reason is None:
            return start
        body = {"index": choice.index, "delta": fields, **self._details(choice, delta)}
        return start + self._event(choice, _json(body))

    def _whole(self, choices: Sequence[Choice]) -> dict[str, Any]:
        answers = []
        for choice in choices:
            delta = choice.take()
            found = self._push(choice, delta)
            for call in found.get("tool_calls", ()):
                del call["index"]
            content = found.pop("content", None if "tool_calls" in found else "")
            message = {"role": "assistant", "content": content, "refusal": None, **found}
            answers.append({"index": choice.index, "message": message, **self._details(choice, delta)})
        return {"choices": answers, "usage": usage(choices), **self._of_prompt(choices[0])}

    def _push(self, choice: Choice, delta: Delta) -> dict[str, Any]:
        calls = self._calls.get(choice.index)
        if calls is None:
            calls = _Calls(self._parsing, f"{self._request_id}-{choice.index}")
            self._calls[choice.index] = calls
        return calls.push(choice, delta)

    def _common(self, choice: Choice, delta: Delta) -> dict[str, Any]:
        fields = super()._common(choice, delta)
        if choice.finish_reason == "stop" and self._calls[choice.index].number:
            fields["finish_reason"] = "tool_calls"
        return fields
