"""Splits a choice's answer into parts: content, reasoning, and tool calls with their ids."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple, TypeAlias

import msgspec

from router.parsing.answer import Call, Content, Part, Reasoning
from router.parsing.formats import AnswerParser, Parsing
from router.text.choice import Choice

SHORT_ID_CHARACTERS = 9
PIECE_CHARACTERS = 1024
"""Parsers take at most so much of a text in one go."""


class CallStart(NamedTuple):
    """The beginning of the answer's call with this `number`."""

    number: int
    id: str
    name: str


class MoreArguments(NamedTuple):
    """More text of the arguments of the call with this `number`."""

    number: int
    text: str


AnswerPart: TypeAlias = Content | Reasoning | CallStart | MoreArguments


class AnswerParts:
    """Finds the parts of one choice's answer. If `parsing` is None, the whole answer is content."""

    def __init__(self, parsing: Parsing | None, seed: str) -> None:
        self._parsing = parsing or Parsing()
        self._parser = None if parsing is None else AnswerParser(parsing)
        self._seed = seed
        self._written: set[str] = set()
        self.num_calls = 0
        self._arguments: list[str] = []
        """The latest call's, in pieces."""

    @property
    def ends_with_call(self) -> bool:
        """Whether there are calls and the latest one is whole."""
        try:
            return self.num_calls > 0 and isinstance(msgspec.json.decode("".join(self._arguments)), dict)
        except (msgspec.DecodeError, RecursionError):
            return False

    def push(self, choice: Choice, text: str) -> Iterator[list[AnswerPart]]:
        """Yield the parts in each piece of the choice's new text, and the last ones once it is finished."""
        if self._parser is None:
            yield [Content(text)] if text else []
            return
        for start in range(0, len(text), PIECE_CHARACTERS):
            yield self._all(self._parser.push(text[start : start + PIECE_CHARACTERS]))
        if choice.finish_reason is not None:
            is_cut = choice.finish_reason == "length" or isinstance(choice.stop_reason, str)
            yield self._all(self._parser.finish(is_cut=is_cut))

    def _all(self, parts: Sequence[Part]) -> list[AnswerPart]:
        return [found for part in parts for found in self._found(part)]

    def _found(self, part: Part) -> Iterator[AnswerPart]:
        if isinstance(part, Content | Reasoning):
            yield part
            return
        self.num_calls += isinstance(part, Call)
        if self._parsing.one_call and self.num_calls > 1:
            return
        number = self.num_calls - 1
        if isinstance(part, Call):
            self._arguments.clear()
            yield CallStart(number, self._id(part.id), part.name)
        else:
            self._arguments.append(part.text)
            yield MoreArguments(number, part.text)

    def _id(self, written: str) -> str:
        """Return the id that the model wrote, if it is new; otherwise one that is the same for the same call
        of the same request.
        """
        if written and written not in self._written:
            self._written.add(written)
            return written
        digest = hashlib.blake2b(f"{self._seed}-{self.num_calls}".encode(), digest_size=12).hexdigest()
        tools = self._parsing.tools
        return digest[:SHORT_ID_CHARACTERS] if tools is not None and tools.short_ids else f"call_{digest}"
