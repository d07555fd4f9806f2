"""Parses tool calls that are JSON objects, and passes the arguments' text on as it comes."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection
from typing import TypeAlias

from router.parsing.answer import AnswerText, Parse

_IN_STRING = re.compile(r'[^"\\]+')
_IN_VALUE = re.compile(r'[^"{}\[\]]+')
_SCALAR = re.compile(r'[^"{}\[\],;\s]+')
_WORD = re.compile(r"[\w.\-]+")

ParseCall: TypeAlias = Callable[[AnswerText, Collection[str] | None], Parse[bool]]


def calls(
    answer: AnswerText,
    parse: ParseCall,
    known: Collection[str] | None = None,
    separator: str = ",",
    is_list: bool = False,
) -> Parse[bool]:
    """Parse one call, several, or (if `is_list`, only) a list. Return False if the text is content."""
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
    """Parse an object with `name`, and `arguments` or `parameters`, in any order. Return False if the text is
    none, or, with `known`, calls any other function.
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
    """Write a JSON value as it is spelled; if it is a string that contains JSON, write the string's value.

    Return False if it is cut off.
    """
    if (yield from answer.peek()) != '"':
        return (yield from _value(answer, write))
    text = yield from _string(answer)
    write((text or "").encode(errors="replace").decode())
    return text is not None


def named(answer: AnswerText, name: str, call_id: str = "") -> Parse[bool]:
    """Parse the arguments of a call whose name and id came before them. Return False if no object comes."""
    yield from answer.skip_space()
    if not name or (yield from answer.peek()) != "{":
        answer.give_up()
        return False
    answer.call(name, call_id)
    return (yield from _value(answer, answer.arguments))


def word(answer: AnswerText) -> Parse[str]:
    """Read a function's name, or an id."""
    texts: list[str] = []
    yield from answer.run(_WORD, texts.append)
    return "".join(texts)


def _value(answer: AnswerText, write: Callable[[str], object]) -> Parse[bool]:
    """Write any value as it is spelled. Brackets are counted, not matched."""
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
    """Write a string as it is spelled."""
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
    """Return a string's value, None if no string comes."""
    if (yield from answer.peek()) != '"':
        return None
    spelled: list[str] = []
    if not (yield from _quoted(answer, spelled.append)):
        return None
    try:
        said: str = json.loads("".join(spelled), strict=False)
    except ValueError:
        return None
    return said
