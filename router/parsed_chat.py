"""Answers of `/v1/chat/completions` with reasoning and tool calls in addition to their content."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from router.answer_parts import AnswerPart, AnswerParts, CallStart, MoreArguments
from router.choice import Choice, ChoiceDelta
from router.formats import AnswerFormat, ChatFormat, OutputOptions, usage
from router.parsing.answer import Content, Reasoning
from router.parsing.formats import Parsing
from router.tokenizer import Tokenizer

_json = msgspec.json.Encoder().encode


def chat_format(tokenizer: Tokenizer, model: str, request_id: str, options: OutputOptions) -> AnswerFormat:
    """Return the writer of a chat's answer."""
    if options.parsing is None:
        return ChatFormat(tokenizer, model, request_id, options)
    return ParsedChatFormat(tokenizer, model, request_id, options, options.parsing)


def _fields(parts: Sequence[AnswerPart]) -> dict[str, Any]:
    """Return the parts as a message's fields: `reasoning_content`, `content`, `tool_calls`."""
    fields: dict[str, Any] = {}
    for part in parts:
        if isinstance(part, Content):
            fields["content"] = fields.get("content", "") + part.text
        elif isinstance(part, Reasoning):
            fields["reasoning_content"] = fields.get("reasoning_content", "") + part.text
        else:
            _add_call_part(fields.setdefault("tool_calls", []), part)
    return fields


def _add_call_part(calls: list[dict[str, Any]], part: CallStart | MoreArguments) -> None:
    if isinstance(part, CallStart):
        function = {"name": part.name, "arguments": ""}
        calls.append({"index": part.number, "id": part.id, "type": "function", "function": function})
        return
    if not calls:
        calls.append({"index": part.number, "function": {"arguments": ""}})
    calls[-1]["function"]["arguments"] += part.text


class ParsedChatFormat(ChatFormat):
    """Writes a chat's answer with the parts that the parsers find in each choice's text."""

    def __init__(
        self, tokenizer: Tokenizer, model: str, request_id: str, options: OutputOptions, parsing: Parsing
    ) -> None:
        super().__init__(tokenizer, model, request_id, options)
        self._parsing = parsing
        self._request_id = request_id
        self._answers: dict[int, AnswerParts] = {}

    def chunk(self, choice: Choice) -> bytes:
        delta, first = choice.take_delta(), choice.index not in self._answers
        fields = self._push(choice, delta)
        start = self._role(choice) if first else b""
        if self._options.only_text and not fields and choice.finish_reason is None:
            return start
        body = {"index": choice.index, "delta": fields, **self._details(choice, delta)}
        return start + self._event(choice, _json(body))

    def _whole(self, choices: Sequence[Choice]) -> dict[str, Any]:
        answers = []
        for choice in choices:
            delta = choice.take_delta()
            found = self._push(choice, delta)
            for call in found.get("tool_calls", ()):
                del call["index"]
            content = found.pop("content", None if "tool_calls" in found else "")
            message = {"role": "assistant", "content": content, "refusal": None, **found}
            answers.append({"index": choice.index, "message": message, **self._details(choice, delta)})
        return {"choices": answers, "usage": usage(choices), **self._of_prompt(choices[0])}

    def _push(self, choice: Choice, delta: ChoiceDelta) -> dict[str, Any]:
        answer = self._answers.get(choice.index)
        if answer is None:
            answer = AnswerParts(self._parsing, f"{self._request_id}-{choice.index}")
            self._answers[choice.index] = answer
        return _fields(answer.push(choice, delta.text))

    def _common(self, choice: Choice, delta: ChoiceDelta) -> dict[str, Any]:
        fields = super()._common(choice, delta)
        if choice.finish_reason == "stop" and self._answers[choice.index].num_calls:
            fields["finish_reason"] = "tool_calls"
        return fields
