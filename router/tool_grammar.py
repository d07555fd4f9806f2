"""Grammars under which an answer calls functions in the model's own form, behind what it thinks."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Sequence
from typing import Any

import msgspec

from router.json_schemas import schema_grammar
from router.parsing.forms import CallForm
from router.parsing.reasoning import Marks

_NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}
_TERMINALS = ("TEXT: /(.|\\n)*/", "OTHER: /([^{\\s](.|\\n)*)?/", "SPACE: /\\s{0,4}/")


class Offer(msgspec.Struct, frozen=True):
    """A function. Of a `strict` one each keyword of the schema is kept to, of others those that can be."""

    name: str
    schema: dict[str, Any] | None
    strict: bool


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
        is_lazy = not any(text.startswith(marker) for text in texts for marker in self._ids)
        return f"{name}{'[lazy]' if is_lazy else ''}: TEXT {self.any_of(texts)}"

    def _piece(self, piece: str) -> str:
        token_id = self._ids.get(piece)
        return json.dumps(piece, ensure_ascii=False) if token_id is None else f"<[{token_id}]>"


def tool_grammar(
    form: CallForm,
    offers: Sequence[Offer],
    spelling: Spelling,
    *,
    demanded: bool,
    several: bool,
    marks: Marks | None = None,
    is_open: bool = False,
) -> str:
    """As llguidance reads it. `demanded`: the answer is calls; otherwise it is text and may have some."""
    numbers = range(len(offers))
    again = f"({spelling(form.separator)} call)*" if several and form.separator is not None else ""
    rules = [
        f"block: {spelling(form.open)} call {again} {spelling(form.close)}",
        "call: " + " | ".join(f"call{number}" for number in numbers),
    ]
    for number, offer in enumerate(offers):
        begin, end = spelling(form.begin % offer.name), spelling(form.end)
        rules.append(f"call{number}: {begin} @arguments{number} {end}")
    trigger = spelling(form.trigger)
    if demanded:
        further = several and form.between is not None
        start = f"{trigger} block" + (
            f" ({spelling(form.between or '')} {trigger} block)*" if further else ""
        )
    elif form.trigger:
        rules.append(spelling.rule_up_to("head", [form.trigger]))
        start = f"(head block){'*' if several else '?'} TEXT"
    else:
        start = "(block | OTHER)"
    grammars = [_arguments(f"arguments{number}", offer) for number, offer in enumerate(offers)]
    return _grammar(start, rules, grammars, spelling, marks, is_open)


def after_thinking(grammar: str, spelling: Spelling, marks: Marks, is_open: bool) -> str:
    """The answer is of `grammar`, and what comes before it is free."""
    first, *others = json.loads(grammar)["grammars"]
    return _grammar(
        f"{spelling(marks.lead)} @answer",
        [],
        [{**first, "name": "answer"}, *others],
        spelling,
        marks,
        is_open,
    )


def _grammar(
    start: str,
    rules: Sequence[str],
    grammars: Sequence[dict[str, Any]],
    spelling: Spelling,
    marks: Marks | None,
    is_open: bool,
) -> str:
    before = ""
    if marks is not None:
        before = "thought" if is_open else f"({spelling.any_of(marks.open)} thought)?"
        rules = [*rules, spelling.rule_up_to("thought", marks.close)]
    lines = ["%llguidance {}", f"start: {before} SPACE {start}", *rules, *_TERMINALS]
    return json.dumps({"grammars": [{"lark_grammar": "\n".join(lines)}, *grammars]}, ensure_ascii=False)


def _arguments(name: str, offer: Offer) -> dict[str, Any]:
    schema = offer.schema if offer.schema is not None else _NO_PARAMETERS
    made = schema_grammar(schema, "tools", lenient=not offer.strict)
    return {**json.loads(made)["grammars"][0], "name": name}
