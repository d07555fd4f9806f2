"""The text of an answer as it is generated, and the parts that parsers find in it.

A parser is a generator that reads the text from start to end like a grammar and yields when it needs more
text. Its decisions depend only on the text, so the parts do not depend on how the text was split.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import TypeAlias, TypeVar

import msgspec

from router.text.detokenizer import possible_start

T = TypeVar("T")
Parse: TypeAlias = Generator[None, None, T]


class Content(msgspec.Struct, frozen=True):
    """Text for the client."""

    text: str


class Reasoning(msgspec.Struct, frozen=True):
    """The model's thinking before the content."""

    text: str


class CallStart(msgspec.Struct, frozen=True):
    """The beginning of a call; its arguments follow."""

    name: str
    id: str = ""
    """Id from the model, if any."""
    number: int = 0
    """Index of the call among the answer's."""


class Arguments(msgspec.Struct, frozen=True):
    """More of the latest call's arguments, as JSON text."""

    text: str
    number: int = 0


Part: TypeAlias = Content | Reasoning | CallStart | Arguments


class _Trimmed:
    """A filter of white space at the start of a text, and at its end unless more text follows."""

    def __init__(self, keeps_start: bool) -> None:
        self._has_begun = keeps_start
        self._is_first = True
        self._held = ""

    def push(self, text: str) -> str:
        if not self._has_begun:
            text = text.lstrip()
            self._has_begun = bool(text)
        text = self._held + text
        body = text.rstrip()
        self._held = text[len(body) :]
        self._is_first = self._is_first and not body
        return body

    def start_section(self) -> None:
        """Put a line break between the text so far and the following text."""
        self._has_begun, self._held = False, "" if self._is_first else "\n"

    def keep_start(self) -> None:
        self._has_begun = True

    def end(self) -> str:
        return self._held if self._has_begun else ""


class AnswerText:
    """The text that parsers read, and the parts that they write. No text is lost or written twice."""

    def __init__(self, must_call: bool = False) -> None:
        """Initialize. `must_call`: the answer has no content; a part that was cut off is part of a call."""
        self._text = ""
        self._at = 0
        self._begun: int | None = None
        """Start of a part that becomes content if it turns out not to be a call."""
        self._may_be_text = False
        self._must_call, self._has_called = must_call, False
        self._content, self._reasoning = _Trimmed(True), _Trimmed(False)
        self.frame: tuple[str, ...] = ()
        """Marks that are removed from the content."""
        self.is_over = self.is_cut = False
        """`is_over`: no more text follows. `is_cut`: a limit or a stop string ended the answer."""
        self.parts: list[Part] = []

    def push(self, text: str) -> None:
        done = self._at if self._begun is None else self._begun
        self._text = self._text[done:] + text
        self._at -= done
        if self._begun is not None:
            self._begun = 0

    def peek(self) -> Parse[str]:
        """Return the next character without reading it; "" at the end."""
        while self._at == len(self._text) and not self.is_over:
            yield
        return self._text[self._at : self._at + 1]

    def read(self, number: int) -> Parse[str]:
        """Read `number` characters, or fewer at the end."""
        while len(self._text) - self._at < number and not self.is_over:
            yield
        taken = self._text[self._at : self._at + number]
        self._at += len(taken)
        return taken

    def run(self, pattern: re.Pattern[str], write: Callable[[str], object]) -> Parse[None]:
        """Read and write all characters that `pattern` matches, each one independently of the others."""
        while (yield from self.peek()) and (match := pattern.match(self._text, self._at)):
            self._at = match.end()
            write(match[0])

    def skip_space(self) -> Parse[None]:
        yield from self.run(_SPACE, _forget)

    def word(self) -> Parse[str]:
        """Read the name of a function, or an id."""
        texts: list[str] = []
        yield from self.run(_WORD, texts.append)
        return "".join(texts)

    def accept(self, *words: str) -> Parse[str]:
        """Read whichever of `words` comes next and return it; return "" if the text continues differently."""
        while True:
            rest = self._text[self._at : self._at + max(map(len, words))]
            for word in words:
                if rest.startswith(word):
                    self._at += len(word)
                    return word
            if self.is_over or not any(word.startswith(rest) for word in words):
                if self._is_cut_mark(rest, words):
                    self._text = self._text[: self._at]
                return ""
            yield

    def until(self, *markers: str, write: Callable[[str], object] | None = None) -> Parse[str]:
        """Read up to the first of `markers` and return it; "" if the text ends without one.

        The text before the marker is written as content, or by `write`, once it cannot be part of a marker.
        """
        frame = self.frame if write is None else ()
        write, markers = write or self.content, (*markers, *frame)
        while True:
            rest = self._text[self._at :]
            found = [(at, marker) for marker in markers if (at := rest.find(marker)) >= 0]
            at, marker = min(found, default=(possible_start(rest, markers), ""))
            if self.is_over and not marker:
                if self._is_cut_mark(rest[at:], markers):
                    self._text = self._text[: self._at + at]
                else:
                    at = len(rest)
            self._at += at + len(marker)
            if at:
                write(rest[:at])
            if marker in frame:
                self._content.start_section()
                continue
            if marker or self.is_over:
                return marker
            yield

    def _is_cut_mark(self, rest: str, marks: Sequence[str]) -> bool:
        """Return whether the answer was cut off within one of `marks`. A single character counts as text."""
        is_long = len(rest) > 1 and not rest[0].isalnum()
        may_be = self.is_cut and bool(rest) and (is_long or self._has_called or self._must_call)
        return may_be and any(mark.startswith(rest) for mark in marks)

    def begin_part(self, marker: str = "", *, may_be_text: bool = False) -> None:
        """Begin a part that may become a call, with the `marker` just read.

        `may_be_text`: a part that is cut off counts as text, unless a marker follows.
        """
        if self._begun is None:
            self._begun = self._at - len(marker)
            self._may_be_text = may_be_text and not self._must_call
        elif marker:
            self._may_be_text = False

    def give_up(self) -> None:
        """End the part that did not become a call. It is content unless it was cut off as a call."""
        if self._begun is None:
            return
        begun, self._begun = self._begun, None
        if self.is_cut and not self._may_be_text:
            self._at = len(self._text)
        else:
            self.content(self._text[begun : self._at])

    def content(self, text: str) -> None:
        if body := self._content.push(text):
            self.parts.append(Content(body))

    def reasoning(self, text: str) -> None:
        if body := self._reasoning.push(text):
            self.parts.append(Reasoning(body))

    def commit(self) -> None:
        """Confirm the current part. Later content and reasoning are separated from earlier ones."""
        self._begun = None
        self._content.start_section()
        self._reasoning.start_section()

    def keep_space(self) -> None:
        """Keep the white space at the start of the following content."""
        self._content.keep_start()

    def call(self, name: str, call_id: str = "") -> None:
        self.commit()
        self._has_called = True
        self.parts.append(CallStart(name, call_id))

    def arguments(self, text: str) -> None:
        if text:
            self.parts.append(Arguments(text))

    def finish(self) -> None:
        """Write the rest after the parser has read the whole text."""
        self.give_up()
        if rest := self._content.end():
            self.parts.append(Content(rest))


_SPACE = re.compile(r"[ \t\r\n]+")
"""JSON's white space."""
_WORD = re.compile(r"[\w.\-]+")


def _forget(text: str) -> None:
    """Discard text that is read but not written."""


def tokens_in(texts: Iterable[str]) -> list[str]:
    """Return the marks in these texts that may be special tokens."""
    return list(dict.fromkeys(mark for text in texts for mark in _TOKEN.findall(text)))


_TOKEN = re.compile(r"<[^<>]*>|\[/?[A-Z_]+\]")
