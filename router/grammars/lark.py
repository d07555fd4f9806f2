"""Grammars in llguidance's dialect of Lark, in the JSON format in which llguidance reads all grammars."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from router.grammars.json_schemas import narrow_schema

TEXT = "TEXT: /(.|\\n)*/"
"""A terminal for any text without special tokens."""
_SCHEMA_MARK = re.compile(
    r'(?:#|//)[^\n]*|"(?:\\.|[^"\\\n])*"?|/(?:\\.|[^/\\\n])+/|(?P<schema>%json\s*)', re.DOTALL
)
"""Matches the mark before a schema, or a comment, a literal or an expression that may look like it."""


def lark_grammar(*lines: str, others: Sequence[Mapping[str, Any]] = ()) -> str:
    """Return a grammar of rules with a `start`. The rules refer to `others` with an `@`."""
    return json.dumps({"grammars": [{"lark_grammar": "\n".join(lines)}, *others]}, ensure_ascii=False)


def named(name: str, grammar: str) -> list[dict[str, Any]]:
    """Return a grammar and the grammars that it refers to, as `others` of one that refers to it by this
    name.
    """
    first, *others = json.loads(grammar)["grammars"]
    return [{**first, "name": name}, *others]


def quoted(text: str) -> str:
    """Return a literal. Its escapes are JSON's, but unlike a JSON string it cannot contain U+007F
    unescaped.
    """
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
    """Spells a text in a grammar: added tokens by their ids, since their texts would match other tokens."""

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
        """Return rules for the text of a terminal, up to and including the first of `texts`."""
        cuts = [match.start() for text in texts if (match := self._split.search(text))]
        if not cuts:
            return f"{name}[lazy]: {terminal} {self.any_of(texts)}"
        if not any(cuts):
            return f"{name}: {terminal} {self.any_of(texts)}"
        (text,), (at,) = texts, cuts  # the text before a token ends with it
        upper = f"{name.upper()}_"
        return f"{upper}: {terminal} {quoted(text[:at])}\n{name}: {upper} {self(text[at:])}"

    def _piece(self, piece: str) -> str:
        token_id = self._ids.get(piece)
        return quoted(piece) if token_id is None else f"<[{token_id}]>"
