"""Grammars in llguidance's dialect of Lark, in the JSON that it reads grammars of any notation from."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any


def lark_grammar(*lines: str, others: Sequence[Mapping[str, Any]] = ()) -> str:
    """Rules with a `start`. They name the `others` with an `@`."""
    return json.dumps({"grammars": [{"lark_grammar": "\n".join(lines)}, *others]}, ensure_ascii=False)


def quoted(text: str) -> str:
    """A literal. Its escapes are JSON's, but unlike a string of JSON it cannot have U+007F as it is."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


class Spelling:
    """How a grammar spells a text: added tokens by their ids, as their texts stand for other tokens."""

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

    def rule_up_to(self, name: str, texts: Sequence[str]) -> str:
        """A rule for any text and the first of `texts` in it."""
        is_lazy = not any(text.startswith(tuple(self._ids)) for text in texts)
        return f"{name}{'[lazy]' if is_lazy else ''}: TEXT {self.any_of(texts)}"

    def _piece(self, piece: str) -> str:
        token_id = self._ids.get(piece)
        return quoted(piece) if token_id is None else f"<[{token_id}]>"
