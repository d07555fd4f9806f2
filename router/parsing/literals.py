"""Parsers of calls with arguments in Python's or Gemma's notation, which become JSON as they come."""

from __future__ import annotations

import ast
import json
import math
import re
from collections.abc import Callable, Collection
from typing import NamedTuple

import msgspec

from router.parsing.answer import AnswerText, Parse

_KEY = re.compile(r"[^=:,()\[\]{}]+")
_IN_BARE = re.compile(r"[^,()\[\]{}]+")
_NUMBER = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?", re.ASCII)
_OTHER_NUMBER = re.compile(r"[+-]?[0-9a-fA-FxXoO_.]{1,64}", re.ASCII)
"""Matches other numbers that Python can write."""
_CONSTANTS = {"True": "true", "False": "false", "None": "null"}
_CONSTANTS |= {word: word for word in ("true", "false", "null")}
_HEX_DIGITS = {"x": 2, "u": 4, "U": 8}
_ESCAPES = {
    **{char: f"\\{char}" for char in 'ntrbf"\\'},
    "'": "'",
    "/": "/",
    "\n": "",
    "a": "\\u0007",
    "v": "\\u000b",
    "0": "\\u0000",
}
"""JSON for Python's escapes, and for JSON's escape of a slash."""


class _Bracket(NamedTuple):
    close: str
    json_open: str
    json_close: str
    assign: str = ""
    """Mark between a key and its value."""


_BRACKETS = {
    "[": _Bracket("]", "[", "]"),
    "(": _Bracket(")", "[", "]"),
    "{": _Bracket("}", "{", "}", ":"),
}


class Literals(msgspec.Struct, frozen=True):
    """A notation of calls: `lead`, the function's name, and its arguments in brackets. A value without quotes
    that is neither a number nor a constant is a string too.
    """

    lead: str
    open: str
    close: str
    assign: str
    """Mark between the name and the value of an argument."""
    quotes: tuple[str, ...]
    has_escapes: bool

    def parse(self, answer: AnswerText, known: Collection[str] | None) -> Parse[bool]:
        """Parse a call. Return False for other text and, with `known`, for a call of another function."""
        if not (yield from answer.accept(self.lead)) and self.lead:
            return False
        name = yield from answer.word()
        if not name or (known is not None and name not in known):
            return False
        if not (yield from answer.accept(self.open)):
            return False
        return (yield from self._arguments(answer, name))

    def _arguments(self, answer: AnswerText, name: str) -> Parse[bool]:
        brackets = [_Bracket(self.close, "{", "}", self.assign)]
        lead, has_begun = "{", False
        while brackets:
            close, _, json_close, assign = brackets[-1]
            yield from answer.skip_space()
            if not (yield from answer.peek()):
                return False
            is_end = bool((yield from answer.accept(close)))
            text = "" if is_end and lead == ", " else lead
            if is_end:
                text += json_close
            elif assign:
                if (key := (yield from self._key(answer, assign))) is None:
                    return False
                text += f"{key}: "
            if not has_begun:
                answer.call(name)
                has_begun = True
            answer.arguments(text)
            lead = ", "
            if is_end:
                brackets.pop()
            else:
                yield from answer.skip_space()
                if opened := (yield from answer.accept(*_BRACKETS)):
                    brackets.append(_BRACKETS[opened])
                    lead = brackets[-1].json_open
                    continue
                if not (yield from self._scalar(answer)):
                    return False
            if brackets:
                yield from answer.skip_space()
                yield from answer.accept(",")
        return True

    def _key(self, answer: AnswerText, assign: str) -> Parse[str | None]:
        """Return a key as JSON; None if no key follows."""
        texts: list[str] = []
        if quote := (yield from answer.accept(*self.quotes)):
            if not (yield from self._string(answer, quote, texts.append)):
                return None
            key = f'"{"".join(texts)}"'
        else:
            yield from answer.run(_KEY, texts.append)
            key = json.dumps("".join(texts).strip(), ensure_ascii=False)
        yield from answer.skip_space()
        return key if key != '""' and (yield from answer.accept(assign)) else None

    def _scalar(self, answer: AnswerText) -> Parse[bool]:
        if quote := (yield from answer.accept(*self.quotes)):
            answer.arguments('"')
            is_whole = yield from self._string(answer, quote, answer.arguments)
            answer.arguments('"' if is_whole else "")
            return is_whole
        text = yield from _bare(answer)
        answer.arguments(_as_json(text) if text else "")
        return bool(text)

    def _string(self, answer: AnswerText, quote: str, write: Callable[[str], object]) -> Parse[bool]:
        """Write a string, after its opening quote, as JSON without quotes."""
        if self.has_escapes and (yield from answer.accept(quote * 2)):
            quote *= 3
        marks = (quote, "\\") if self.has_escapes else (quote,)
        while mark := (yield from answer.until(*marks, write=lambda text: write(_escaped(text)))):
            if mark == quote:
                return True
            write((yield from _escape(answer)))
        return False


PYTHON = Literals("", "(", ")", "=", ('"', "'"), True)
GEMMA = Literals("call:", "{", "}", ":", ('<|"|>',), False)


def _escape(answer: AnswerText) -> Parse[str]:
    """Return the character after a backslash as JSON."""
    char = yield from answer.read(1)
    if char not in _HEX_DIGITS:
        return _ESCAPES.get(char, _escaped(f"\\{char}") if char else "")
    digits = ""
    while len(digits) < _HEX_DIGITS[char]:
        digit = yield from answer.peek()
        if digit not in "0123456789abcdefABCDEF":
            return _escaped(f"\\{char}{digits}")
        if not digit:
            return ""
        digits += yield from answer.read(1)
    number = int(digits, 16)
    return json.dumps(chr(number))[1:-1] if number <= 0x10FFFF else _escaped(f"\\{char}{digits}")


def _bare(answer: AnswerText) -> Parse[str]:
    """Read a value without quotes up to the next comma or bracket. Return "" if it is cut off."""
    texts: list[str] = []
    depth = 0
    while next_ := (yield from answer.peek()):
        if not depth and next_ in ",)]}":
            break
        depth += (next_ in "([{") - (next_ in ")]}")
        texts.append((yield from answer.read(1)))
        yield from answer.run(_IN_BARE, texts.append)
    return "".join(texts).strip() if next_ else ""


def _as_json(text: str) -> str:
    if text in _CONSTANTS:
        return _CONSTANTS[text]
    if _NUMBER.fullmatch(text):
        return text
    try:
        number = ast.literal_eval(text) if _OTHER_NUMBER.fullmatch(text) else None
    except (ValueError, SyntaxError):
        number = None
    if isinstance(number, int | float) and math.isfinite(number):
        return json.dumps(number)
    return json.dumps(text, ensure_ascii=False)


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]
