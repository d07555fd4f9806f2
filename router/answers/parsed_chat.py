"""Answers of `/v1/chat/completions` with content, reasoning and tool calls."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any

import msgspec

from router.answers.formats import AnswerFormat, ChatFormat, OutputOptions
from router.parsing.answer import Arguments, CallStart, Content, Part, Reasoning
from router.parsing.formats import TOOL_FORMATS, AnswerParser, Parsing
from router.requests.slices import json_pieces
from router.text.choice import Choice, ChoiceDelta
from router.text.tokenizer import Tokenizer


def chat_format(tokenizer: Tokenizer, model: str, request_id: str, options: OutputOptions) -> AnswerFormat:
    if options.parsing is None:
        return ChatFormat(tokenizer, model, request_id, options)
    return ParsedChatFormat(tokenizer, model, request_id, options, options.parsing)


class _Found:
    """The fields of a message by its parts: `reasoning_content`, `content`, `tool_calls`."""

    def __init__(self) -> None:
        self._texts: dict[str, list[str]] = {}
        self._calls: list[tuple[dict[str, Any], list[str]]] = []
        """Each call with the pieces of its arguments."""

    def add(self, part: Part) -> None:
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
            fields["tool_calls"] = (
                {**call, "function": {**call["function"], "arguments": "".join(pieces)}}
                for call, pieces in self._calls
            )
        return fields


class ParsedChatFormat(ChatFormat):
    """A chat's writer that finds reasoning and tool calls in each choice's text."""

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
            calls = found["tool_calls"]
            found["tool_calls"] = ({name: call[name] for name in call if name != "index"} for call in calls)
        content = found.pop("content", None if "tool_calls" in found else "")
        message = {"role": "assistant", "content": content, "refusal": None, **found}
        yield from json_pieces({"index": choice.index, "message": message, **self._details(choice, delta)})

    def _push(self, choice: Choice, delta: ChoiceDelta) -> Generator[bytes, None, dict[str, Any]]:
        """Return the message's new fields. Yields b"" after each piece of a long text."""
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


SHORT_ID_CHARACTERS = 9
PIECE_CHARACTERS = 1024
"""Most characters that parsers process without a pause."""


Event = dict[str, Any]


class AnswerParts:
    """The parts of one choice's answer. If `parsing` is None, the whole answer is content."""

    def __init__(self, parsing: Parsing | None, seed: str) -> None:
        self._parsing = parsing or Parsing()
        self._parser = None if parsing is None else AnswerParser(parsing)
        self._seed = seed
        self._written: set[str] = set()
        self.num_calls = 0
        self._arguments: list[str] = []
        """Arguments of the latest call, in pieces."""

    @property
    def ends_with_call(self) -> bool:
        """Whether the answer has calls and the latest one is complete."""
        try:
            return self.num_calls > 0 and isinstance(msgspec.json.decode("".join(self._arguments)), dict)
        except (msgspec.DecodeError, RecursionError):
            return False

    def push(self, choice: Choice, text: str) -> Iterator[list[Part]]:
        """Yield the parts of each piece of the choice's new text; at its end, also the remaining parts."""
        if self._parser is None:
            yield [Content(text)] if text else []
            return
        for start in range(0, len(text), PIECE_CHARACTERS):
            yield self._all(self._parser.push(text[start : start + PIECE_CHARACTERS]))
        if choice.finish_reason is not None:
            is_cut = choice.finish_reason == "length" or isinstance(choice.stop_reason, str)
            yield self._all(self._parser.finish(is_cut=is_cut))

    def events(self, choice: Choice, push: Callable[[Part], Iterator[Event]]) -> Iterator[Event | None]:
        """Yield the events of `push` for new parts, and None after each piece of a long text."""
        for parts in self.push(choice, choice.take_text()):
            for part in parts:
                yield from push(part)
            yield None

    def _all(self, parts: Sequence[Part]) -> list[Part]:
        return [found for part in parts for found in self._found(part)]

    def _found(self, part: Part) -> Iterator[Part]:
        if isinstance(part, Content | Reasoning):
            yield part
            return
        self.num_calls += isinstance(part, CallStart)
        if self._parsing.one_call and self.num_calls > 1:
            return
        number = self.num_calls - 1
        if isinstance(part, CallStart):
            self._arguments.clear()
            yield CallStart(part.name, self._id(part.id), number)
        else:
            self._arguments.append(part.text)
            yield Arguments(part.text, number)

    def _id(self, written: str) -> str:
        """Return the id that the model wrote if it is new, else one derived from the request."""
        if written and written not in self._written:
            self._written.add(written)
            return written
        digest = hashlib.blake2b(f"{self._seed}-{self.num_calls}".encode(), digest_size=12).hexdigest()
        tools = self._parsing.tools
        short_ids = tools is not None and TOOL_FORMATS[tools].short_ids
        return digest[:SHORT_ID_CHARACTERS] if short_ids else f"call_{digest}"
