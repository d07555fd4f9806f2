"""Grammars in llguidance's dialect of Lark, some converted from GBNF, llama.cpp's notation.

llguidance converts GBNF to Lark but copies literals and character classes unchanged, which Lark and its
regular expressions read differently. So these are first respelled to mean the same in both.
"""

from __future__ import annotations

import json
import re
import string
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from llguidance.gbnf_to_lark import gbnf_to_lark

from router.grammars.json_schemas import class_of, narrow_schema

TEXT = "TEXT: /(.|\\n)*/"
"""A terminal for any text without special tokens."""
_SCHEMA_MARK = re.compile(
    r'(?:#|//)[^\n]*|"(?:\\.|[^"\\\n])*"?|/(?:\\.|[^/\\\n])+/|(?P<schema>%json\s*)', re.DOTALL
)
"""Matches the mark before a JSON schema, or a comment, literal or expression that may look like it."""


def lark_grammar(*lines: str, others: Sequence[Mapping[str, Any]] = ()) -> str:
    """Return a grammar with these rules, one of which is `start`. Rules refer to `others` with an `@`."""
    return json.dumps({"grammars": [{"lark_grammar": "\n".join(lines)}, *others]}, ensure_ascii=False)


def named(name: str, grammar: str) -> list[dict[str, Any]]:
    """Return a grammar under this name, with the grammars that it refers to, for use as `others`."""
    first, *others = json.loads(grammar)["grammars"]
    return [{**first, "name": name}, *others]


def quoted(text: str) -> str:
    """Return a literal with JSON's escapes. It must not contain U+007F unescaped."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def with_narrow_schemas(lark: str, field: str) -> str:
    """Replace each JSON schema with one that llguidance enforces exactly. Raises `InvalidRequestError`."""
    pieces, done, at = [], 0, 0
    while (match := _SCHEMA_MARK.search(lark, at)) is not None:
        at = match.end()
        if match["schema"] is None:
            continue
        try:
            schema, end = json.JSONDecoder().raw_decode(lark, at)
        except (ValueError, RecursionError):
            continue  # llguidance reports the error
        if isinstance(schema, dict):
            pieces += [lark[done:at], json.dumps(narrow_schema(schema, field, {}), ensure_ascii=False)]
            done = at = end
    return "".join([*pieces, lark[done:]])


class Spelling:
    """The spelling of texts in a grammar: added tokens by id, since their text would match other tokens."""

    def __init__(self, markers: Collection[str], token_id: Callable[[str], int | None]) -> None:
        found = {text: token_id(text) for text in sorted(markers, key=len, reverse=True)}
        self._ids = {text: token for text, token in found.items() if token is not None}
        self._split = re.compile("|".join(map(re.escape, self._ids)) or "(?!)")

    def __call__(self, text: str) -> str:
        pieces, at = [], 0
        for match in self._split.finditer(text):
            pieces += [text[at : match.start()], match[0]]
            at = match.end()
        return " ".join(self._piece(piece) for piece in [*pieces, text[at:]] if piece)

    def any_of(self, texts: Sequence[str]) -> str:
        return f"({' | '.join(map(self, texts))})"

    def rule_up_to(self, name: str, texts: Sequence[str], terminal: str = "TEXT") -> str:
        """Return rules for the text of a terminal up to the first of `texts`, inclusive."""
        cuts = [match.start() for text in texts if (match := self._split.search(text))]
        if not cuts:
            return f"{name}[lazy]: {terminal} {self.any_of(texts)}"
        if not any(cuts):
            return f"{name}: {terminal} {self.any_of(texts)}"
        (text,), (at,) = texts, cuts  # the special token ends the text before it
        upper = f"{name.upper()}_"
        return f"{upper}: {terminal} {quoted(text[:at])}\n{name}: {upper} {self(text[at:])}"

    def _piece(self, piece: str) -> str:
        token_id = self._ids.get(piece)
        return quoted(piece) if token_id is None else f"<[{token_id}]>"


_RULE = re.compile(r"^[ \t]*[\w-]+[ \t]*::=", re.MULTILINE)
_PART = re.compile(r'#[^\r\n]*|"(?:\\.|[^"\\])*"?|\[(?:\\.|[^\]\\])*\]?|\.', re.DOTALL)
"""Matches a literal or class. An unclosed one extends to the end, or each mark would restart the search."""
_CHARACTER = re.compile(r"\\x[0-9a-fA-F]{2}|\\u[0-9a-fA-F]{4}|\\U[0-9a-fA-F]{8}|\\?.", re.DOTALL)
_ESCAPED = {"\\n": "\n", "\\r": "\r", "\\t": "\t", "\\\\": "\\", '\\"': '"', "\\[": "[", "\\]": "]"}
_ANY = f"[\\x00-{chr(0x10FFFF)}]"


def is_gbnf(text: str) -> bool:
    """Return whether the text is GBNF, whose rules have `::=`; Lark's have one colon."""
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
