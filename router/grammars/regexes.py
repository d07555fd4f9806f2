"""Converts character classes of other regular-expression notations into llguidance's.

In llguidance, a class may contain classes, and `&&`, `--` and `~~` between them.
"""

from __future__ import annotations

import re
from collections.abc import Callable

_ITEM = re.compile(
    r"\\(?:x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|u\{[0-9a-fA-F]+\}|U[0-9a-fA-F]{8}|[pP]\{[^}]*\}|c[A-Za-z]|.)|.",
    re.DOTALL,
)
_CLASS_ESCAPE = re.compile(r"\\[dDwWsSpP]")
_PART = re.compile(r"\\.|\[\^?(?:\\.|[^\]\\])*\]?", re.DOTALL)
"""A class without its end extends to the end of the text. Otherwise each bracket would be searched for
again.
"""


def ends_in_escape(pattern: str) -> bool:
    """Return whether the pattern ends within an escape: llguidance would drop the last backslash."""
    return (len(pattern) - len(pattern.rstrip("\\"))) % 2 == 1


def class_of(body: str, spelled: Callable[[str], str]) -> str:
    """Return the text between a class's brackets. A hyphen makes a range if single characters are on both
    sides.
    """
    items = [match[0] for match in _ITEM.finditer(body)]
    pieces, at = [], 0
    while at < len(items):
        ends = items[at : at + 3]
        is_range = len(ends) == 3 and ends[1] == "-" and not any(map(_CLASS_ESCAPE.match, ends))
        pieces.append(f"{spelled(ends[0])}-{spelled(ends[2])}" if is_range else spelled(ends[0]))
        at += 3 if is_range else 1
    return "".join(pieces)


def from_ecma(pattern: str) -> str:
    """Return a JSON schema's pattern with its classes rewritten so that they mean the same."""
    return _PART.sub(_respelled, pattern)


def _respelled(part: re.Match[str]) -> str:
    text = part[0]
    if text[0] != "[" or not text.endswith("]"):
        return text
    negation = "^" if text[1] == "^" else ""
    body = text[1 + len(negation) : -1]
    if not body:
        return "[\\s\\S]" if negation else "[^\\s\\S]"
    return f"[{negation}{class_of(body, _escaped)}]"


def _escaped(item: str) -> str:
    return "\\" + item if item in "[&~-^" else item
