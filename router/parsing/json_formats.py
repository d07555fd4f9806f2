"""Formats of calls in JSON, with marks around them, a place of their names, and a parser that passes the
arguments' text on as it comes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection
from typing import TypeAlias

import msgspec

from router.parsing.answer import AnswerText, Parse
from router.parsing.literals import GEMMA, PYTHON, Literals

_IN_STRING = re.compile(r'[^"\\]+')
_IN_VALUE = re.compile(r'[^"{}\[\]]+')
_SCALAR = re.compile(r'[^"{}\[\],;\s]+')

ParseCall: TypeAlias = Callable[[AnswerText, Collection[str] | None], Parse[bool]]


def calls(
    answer: AnswerText,
    parse: ParseCall,
    known: Collection[str] | None = None,
    separator: str = ",",
    is_list: bool = False,
) -> Parse[bool]:
    """Parse one call or several, or (with `is_list`, only) a list. Return False if the text is content."""
    yield from answer.skip_space()
    may_parse, is_list = not is_list, bool((yield from answer.accept("[")))
    while True:
        yield from answer.skip_space()
        answer.begin_part()
        if not (may_parse or is_list) or not (yield from parse(answer, known)):
            answer.give_up()
            return False
        yield from answer.skip_space()
        if not (yield from answer.accept("," if is_list else separator)):
            break
    if is_list:
        yield from answer.accept("]")
    return True


def json_call(answer: AnswerText, known: Collection[str] | None) -> Parse[bool]:
    """Parse an object with `name`, and `arguments` or `parameters`, in any order. Return False for other text
    and, with `known`, for a call of another function.
    """
    if not (yield from answer.accept("{")):
        return False
    name, early, has_begun = "", "", False
    while True:
        yield from answer.skip_space()
        if (yield from answer.accept("}")):
            break
        key = yield from _string(answer)
        yield from answer.skip_space()
        if key is None or not (yield from answer.accept(":")):
            return False
        yield from answer.skip_space()
        if key == "name":
            name = (yield from _string(answer)) or ""
            if not name or not name.isprintable() or (known is not None and name not in known):
                return False
        elif key in ("arguments", "parameters") and name and not has_begun:
            answer.call(name)
            has_begun = True
            if not (yield from arguments(answer, answer.arguments)):
                return False
        else:
            texts: list[str] = []
            if not (yield from arguments(answer, texts.append)):
                return False
            if key in ("arguments", "parameters"):
                early = "".join(texts)
        yield from answer.skip_space()
        yield from answer.accept(",")
    if not name:
        return False
    if not has_begun:
        answer.call(name)
        answer.arguments(early or "{}")
    return True


def arguments(answer: AnswerText, write: Callable[[str], object]) -> Parse[bool]:
    """Write a JSON value unchanged, or the content of a string with JSON. Return False if it is cut off."""
    if (yield from answer.peek()) != '"':
        return (yield from _value(answer, write))
    text = yield from _string(answer)
    write((text or "").encode(errors="replace").decode())
    return text is not None


def named(answer: AnswerText, name: str, call_id: str = "") -> Parse[bool]:
    """Parse the arguments of a call whose name and id were read. Return False unless an object follows."""
    yield from answer.skip_space()
    if not name or (yield from answer.peek()) != "{":
        answer.give_up()
        return False
    answer.call(name, call_id)
    return (yield from _value(answer, answer.arguments))


def _value(answer: AnswerText, write: Callable[[str], object]) -> Parse[bool]:
    """Write any value unchanged. Brackets are counted, not matched."""
    depth = 0
    while next_ := (yield from answer.peek()):
        if next_ == '"':
            if not (yield from _quoted(answer, write)):
                return False
        elif next_ in "{[":
            depth += 1
            write((yield from answer.read(1)))
        elif next_ in "}]" and depth:
            depth -= 1
            write((yield from answer.read(1)))
        elif depth:
            yield from answer.run(_IN_VALUE, write)
        else:
            scalar: list[str] = []
            yield from answer.run(_SCALAR, scalar.append)
            write("".join(scalar))
            return bool(scalar)
        if not depth:
            return True
    return False


def _quoted(answer: AnswerText, write: Callable[[str], object]) -> Parse[bool]:
    """Write a string unchanged."""
    write((yield from answer.read(1)))
    while True:
        yield from answer.run(_IN_STRING, write)
        next_ = yield from answer.peek()
        if next_ == '"':
            write((yield from answer.read(1)))
            return True
        if not next_:
            return False
        write((yield from answer.read(2)))


def _string(answer: AnswerText) -> Parse[str | None]:
    """Return the value of a string; None if no string follows."""
    if (yield from answer.peek()) != '"':
        return None
    spelled: list[str] = []
    if not (yield from _quoted(answer, spelled.append)):
        return None
    try:
        text: str = json.loads("".join(spelled), strict=False)
    except ValueError:
        return None
    return text


class Blocks(msgspec.Struct, frozen=True):
    """Blocks of calls: one, several with `separator`, or a list; in JSON, or in a `notation`."""

    open: tuple[str, ...]
    close: str = ""
    separator: str = ","
    language: str = ""
    """Word that may follow the opening mark."""
    is_answer: bool = False
    """Whether the answer may be a block without marks, or other JSON: only offered functions count."""
    is_list: bool = False
    """Whether a block must be a list."""
    notation: Literals | None = None

    def parse(self, answer: AnswerText, known: Collection[str]) -> Parse[None]:
        if self.is_answer:
            answer.begin_part(may_be_text=True)
            yield from answer.skip_space()
            yield from self._block(answer, known, (yield from answer.accept(*self.open)))
        while marker := (yield from answer.until(*self.open)):
            yield from self._block(answer, known, marker)

    def _block(self, answer: AnswerText, known: Collection[str], marker: str) -> Parse[None]:
        answer.begin_part(marker)
        if marker:
            yield from answer.accept(self.language)
        parse = json_call if self.notation is None else self.notation.parse
        offered = known if self.is_answer else None
        if (yield from calls(answer, parse, offered, self.separator, self.is_list)) and marker:
            yield from answer.skip_space()
            yield from answer.accept(self.close)


class NamedCalls(msgspec.Struct, frozen=True):
    """The format of blocks of calls with the name before the arguments. Only the mark `call` is required."""

    open: str
    close: str
    call: str
    """Mark before a call."""
    lead: str
    """Mark before the name."""
    begin: str
    """Mark before the arguments."""
    ends: tuple[str, ...]
    """Marks after the arguments."""
    numbers: bool = False
    """Whether a number follows the name. The lead, the name and the number form the call's id."""

    def parse(self, answer: AnswerText, known: Collection[str]) -> Parse[None]:
        while marker := (yield from answer.until(self.open, self.call)):
            answer.begin_part(marker)
            begins = marker == self.call or (yield from self._begins(answer))
            while begins and (yield from self._call(answer)):
                begins = yield from self._begins(answer)
            answer.give_up()
            yield from answer.accept(self.close)

    def _begins(self, answer: AnswerText) -> Parse[bool]:
        yield from answer.skip_space()
        if marker := (yield from answer.accept(self.call)):
            answer.begin_part(marker)
        return bool(marker)

    def _call(self, answer: AnswerText) -> Parse[bool]:
        yield from answer.skip_space()
        lead = yield from answer.accept(self.lead)
        name = yield from answer.word()
        call_id = ""
        if self.numbers and (yield from answer.accept(":")):
            call_id = f"{lead}{name}:{(yield from answer.word())}"
        yield from answer.skip_space()
        yield from answer.accept(self.begin)
        if not (yield from named(answer, name, call_id)):
            return False
        for mark in self.ends:
            yield from answer.skip_space()
            yield from answer.accept(mark)
        return True


class Mistral(msgspec.Struct, frozen=True):
    """`[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]`, later `[TOOL_CALLS]name[ARGS]{...}`."""

    open: str = "[TOOL_CALLS]"
    call_id: str = "[CALL_ID]"
    begin: str = "[ARGS]"

    def parse(self, answer: AnswerText, known: Collection[str]) -> Parse[None]:
        while marker := (yield from answer.until(self.open)):
            answer.begin_part(marker)
            yield from answer.skip_space()
            name = yield from answer.word()
            if not name:
                yield from calls(answer, json_call)
                continue
            if (yield from answer.accept(self.call_id)):
                yield from answer.word()
            yield from answer.accept(self.begin)
            yield from named(answer, name)


HERMES = Blocks(("<tool_call>",), "</tool_call>")
GRANITE = Blocks(("<|tool_call|>", "<tool_call>"))
LLAMA3 = Blocks(("<|python_tag|>",), separator=";", is_answer=True)
HUNYUAN = Blocks(("<tool_calls>",), "</tool_calls>")
INTERNLM = Blocks(("<|action_start|><|plugin|>",), "<|action_end|>")
PHI4 = Blocks(("functools[",), "]")
XLAM = Blocks(("```",), "```", language="json", is_answer=True)
PYTHONIC = Blocks(("<|python_start|>",), "<|python_end|>", is_answer=True, is_list=True, notation=PYTHON)
GEMMA4 = Blocks(("<|tool_call>",), "<tool_call|>", notation=GEMMA)
MISTRAL = Mistral()
_DEEPSEEK = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>")
_SEPARATOR, _CALL_END = "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
DEEPSEEK_V3 = NamedCalls(*_DEEPSEEK, f"function{_SEPARATOR}", "```json", ("```", _CALL_END))
DEEPSEEK_V31 = NamedCalls(*_DEEPSEEK, "", _SEPARATOR, (_CALL_END,))
KIMI_K2 = NamedCalls(
    "<|tool_calls_section_begin|>",
    "<|tool_calls_section_end|>",
    "<|tool_call_begin|>",
    "functions.",
    "<|tool_call_argument_begin|>",
    ("<|tool_call_end|>",),
    numbers=True,
)
