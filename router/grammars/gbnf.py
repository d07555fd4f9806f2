"""Grammars in GBNF, llama.cpp's notation.

llguidance converts them to Lark but copies literals and character classes as they are spelled, which Lark
and its regular expressions read differently. So they are first respelled to mean the same in both.
"""

from __future__ import annotations

import re
import string

from llguidance.gbnf_to_lark import gbnf_to_lark

from router.grammars.regexes import class_of

_RULE = re.compile(r"^[ \t]*[\w-]+[ \t]*::=", re.MULTILINE)
_PART = re.compile(r'#[^\r\n]*|"(?:\\.|[^"\\])*"?|\[(?:\\.|[^\]\\])*\]?|\.', re.DOTALL)
"""A literal or class without its end extends to the end of the text; otherwise the search would restart at
each opening mark.
"""
_CHARACTER = re.compile(r"\\x[0-9a-fA-F]{2}|\\u[0-9a-fA-F]{4}|\\U[0-9a-fA-F]{8}|\\?.", re.DOTALL)
_ESCAPED = {"\\n": "\n", "\\r": "\r", "\\t": "\t", "\\\\": "\\", '\\"': '"', "\\[": "[", "\\]": "]"}
_ANY = f"[\\x00-{chr(0x10FFFF)}]"


def is_gbnf(text: str) -> bool:
    """Whether the text is GBNF. Lark's rules have one colon."""
    return _RULE.search(text) is not None


def lark_from_gbnf(text: str) -> str:
    """Convert GBNF to Lark. Raises `ValueError`."""
    try:
        return gbnf_to_lark(_PART.sub(_respelled, text))
    except Exception as error:  # the errors have no common type
        raise ValueError(str(error)) from error


def _respelled(part: re.Match[str]) -> str:
    text = part[0]
    ends = {'"': '"', "[": "]"}.get(text[0], "")
    if len(text) == len(ends) or not text.endswith(ends):
        return text
    match text[0]:
        case '"':
            return '"' + "".join(map(_in_literal, _characters(text[1:-1]))) + '"'
        case "[":
            is_negated = text[1] == "^"
            return f"[{'^' if is_negated else ''}{class_of(text[2 if is_negated else 1 : -1], _in_class)}]"
        case ".":
            return _ANY
        case _:
            return text


def _characters(spelled: str) -> list[str]:
    return [_character(match[0]) for match in _CHARACTER.finditer(spelled)]


def _character(spelled: str) -> str:
    if spelled[:2] in ("\\x", "\\u", "\\U") and len(spelled) > 2:
        code = int(spelled[2:], 16)
        if code > 0x10FFFF or 0xD800 <= code < 0xE000:
            raise ValueError(f"{spelled} is no character")
        return chr(code)
    if spelled[0] == "\\" and spelled not in _ESCAPED:
        raise ValueError(f"{spelled} is no escape of GBNF")
    return _ESCAPED.get(spelled, spelled)


def _in_literal(character: str) -> str:
    if character in '"\\':
        return "\\" + character
    return _by_code(character) if character < " " or character == "\x7f" else character


def _in_class(spelled: str) -> str:
    character = _character(spelled)
    is_plain = character > "\x7f" or character in string.ascii_letters + string.digits
    return character if is_plain else _by_code(character)


def _by_code(character: str) -> str:
    return f"\\x{ord(character):02x}"
