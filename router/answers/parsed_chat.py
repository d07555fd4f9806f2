"""Answers of `/v1/chat/completions` with reasoning and tool calls in addition to their content."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import Any

from router.answers.answer_parts import AnswerPart, AnswerParts, CallStart
from router.answers.formats import AnswerFormat, ChatFormat, OutputOptions
from router.parsing.answer import Content, Reasoning
from router.parsing.formats import Parsing
from router.requests.slices import json_pieces
from router.text.choice import Choice, ChoiceDelta
from router.text.tokenizer import Tokenizer


def chat_format(tokenizer: Tokenizer, model: str, request_id: str, options: OutputOptions) -> AnswerFormat:
    """Return the writer of a chat's answer."""
    if options.parsing is None:
        return ChatFormat(tokenizer, model, request_id, options)
    return ParsedChatFormat(tokenizer, model, request_id, options, options.parsing)


class _Found:
    """The parts of a message as its fields: `reasoning_content`, `content`, `tool_calls`."""

    def __init__(self) -> None:
        self._texts: dict[str, list[str]] = {}
        self._calls: list[tuple[dict[str, Any], list[str]]] = []
        """Each with the pieces of its arguments."""

    def add(self, part: AnswerPart) -> None:
        if isinstance(part, Content | Reasoning):
            name = "content" if isinstance(part, Content) else "reasoning_content"
            self._texts.setdefault(name, []).append(part.text)
        elif isinstance(part, CallStart):
            call = {"index": part.number, "id": part.id, "type": "function"}
            self._calls.append(({**call, "function": {"name": part.name}}, []))
        else:
            if not self._calls:
                self._calls.append(({"index": part.number, "function": {}}, []))
            self._calls[-1][1].append(part.text)

    def fields(self) -> dict[str, Any]:
        fields: dict[str, Any] = {name: "".join(pieces) for name, pieces in self._texts.items()}
        if self._calls:
            fields["tool_calls"] = self._written_calls()
        return fields

    def _written_calls(self) -> Iterator[dict[str, Any]]:
        for call, pieces in self._calls:
            function = {**call["function"], "arguments": "".join(pieces)}
            yield {**call, "function": function}


class ParsedChatFormat(ChatFormat):
    """Writes a chat's answer with the parts that the parsers find in each choice's text."""

    def __init__(
        self, tokenizer: Tokenizer, model: str, request_id: str, options: OutputOptions, parsing: Parsing
    ) -> None:
        super().__init__(tokenizer, model, request_id, options)
        self._parsing = parsing
        self._request_id = request_id
        self._answers: dict[int, AnswerParts] = {}

    def chunk(self, choice: Choice) -> Iterator[bytes]:
        delta, first = choice.take_delta(), choice.index not in self._answers
        found = yield from self._push(choice, delta)
        if first:
            yield from self._role(choice)
        if found or not self._options.only_text or choice.finish_reason is not None:
            body = {"index": choice.index, "delta": found, **self._details(choice, delta)}
            yield from self._event(choice, body, is_short=delta.is_short)

    def _whole_choice(self, choice: Choice) -> Iterator[bytes]:
        delta = choice.take_delta()
        found = yield from self._push(choice, delta)
        if "tool_calls" in found:
            found["tool_calls"] = map(_without_index, found["tool_calls"])
        content = found.pop("content", None if "tool_calls" in found else "")
        message = {"role": "assistant", "content": content, "refusal": None, **found}
        yield from json_pieces({"index": choice.index, "message": message, **self._details(choice, delta)})

    def _push(self, choice: Choice, delta: ChoiceDelta) -> Generator[bytes, None, dict[str, Any]]:
        """The message's new fields. It yields nothing, after each piece of a long text."""
        answer = self._answers.get(choice.index)
        if answer is None:
            answer = AnswerParts(self._parsing, f"{self._request_id}-{choice.index}")
            self._answers[choice.index] = answer
        found = _Found()
        for parts in answer.push(choice, delta.text):
            for part in parts:
                found.add(part)
            yield b""
        return found.fields()

    def _common(self, choice: Choice, delta: ChoiceDelta) -> dict[str, Any]:
        fields = super()._common(choice, delta)
        answer, was_stopped = self._answers[choice.index], isinstance(choice.stop_reason, str)
        if choice.finish_reason == "stop" and (answer.ends_with_call if was_stopped else answer.num_calls):
            fields["finish_reason"] = "tool_calls"
        return fields


def _without_index(call: dict[str, Any]) -> dict[str, Any]:
    """As a whole answer has it."""
    return {name: value for name, value in call.items() if name != "index"}
