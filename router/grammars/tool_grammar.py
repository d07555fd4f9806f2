"""Grammars of answers that call functions in the model's own form, after their thinking."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from protocol.errors import InvalidRequestError
from router.grammars.argument_grammar import argument_grammar
from router.grammars.json_schemas import check_references, schema_grammar
from router.grammars.lark import TEXT, Spelling, lark_grammar, named, quoted
from router.grammars.tagged_grammar import PARAMETER_NAME, TaggedArguments
from router.parsing.formats import CallForm
from router.parsing.reasoning import Marks

_NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}
MAX_CALLS = 16
"""The most calls of an answer whose calls have a grammar: a model may never end by itself."""
_NUMBER = "NUMBER: /[0-9]{1,4}/"
_SPACE = "SPACE: /[ \\t\\r\\n]{0,4}/"


class Offer(msgspec.Struct, frozen=True):
    """A function that may be called. Only a `strict` one refuses keywords that cannot be enforced."""

    name: str
    schema: dict[str, Any] | None
    strict: bool


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
    """Return llguidance's grammar of calls alone if they are `demanded`, else of text that may have some."""
    numbers = range(len(offers))
    further = MAX_CALLS - 1 if several else 0
    again = "" if form.separator is None else _up_to(further, spelling(form.separator), "call")
    rules = [
        f"block: {spelling(form.open)} call {again} {spelling(form.close)}",
        "call: " + " | ".join(f"call{number}" for number in numbers),
    ]
    others: list[Mapping[str, Any]] = []
    for number, offer in enumerate(offers):
        pieces = [spelling(piece.replace("%s", offer.name)) for piece in form.begin.split("%d")]
        begin, end, name = " NUMBER ".join(pieces), spelling(form.end), f"arguments{number}"
        schema = offer.schema if offer.schema is not None else _NO_PARAMETERS
        try:
            check_references(schema, "tools")
            if form.notation is not None:
                lenient = not offer.strict
                others += argument_grammar(name, schema, form.notation, spelling, lenient=lenient)
                name = f"@{name}"
            elif form.tags is None:
                others += named(name, schema_grammar(schema, "tools", lenient=not offer.strict))
                name = f"@{name}"
            else:
                tagged = TaggedArguments(name, schema, form.tags, spelling, offer.strict)
                rules += tagged.rules
                others += tagged.others
        except InvalidRequestError as error:
            raise InvalidRequestError("tools", f"{offer.name}: {error.message}") from error
        rules.append(f"call{number}: {begin} {name} {end}")
    if form.tags is not None:
        rules += [f"FREE: TEXT & ~(TEXT {quoted(form.tags.value_end)} TEXT)", PARAMETER_NAME]
    trigger = spelling(form.trigger)
    if demanded:
        start = f"{trigger} block"
        if form.between is not None:
            start += _up_to(further, spelling(form.between), trigger, "block")
    elif form.trigger:
        rules += [
            spelling.rule_up_to("head", [form.trigger], "PLAIN"),
            f"PLAIN: TEXT {'& ~(TEXT CALL TEXT)' if form.elsewhere else ''}",
            f"REST: PLAIN & ~(TEXT {quoted(form.trigger)} TEXT)",
        ]
        start = _up_to(further + 1, "head", "block")
        if marks is not None and marks.lead.startswith(form.trigger):
            start += f" (head {spelling(marks.lead.removeprefix(form.trigger))})?"
        start += " REST"
    else:
        start = "(block | OTHER)"
        rules += [
            f"OTHER: /([^\\{form.open or form.begin[0]} \\t\\r\\n](.|\\n)*)?/ & ~(TEXT CALL TEXT)",
        ]
    if form.elsewhere:
        rules.append(f"CALL: /{form.elsewhere}/")
    if marks is not None:
        rules.append(spelling.rule_up_to("thought", marks.close))
    return lark_grammar(
        f"start: {_thinking(spelling, marks, is_open)} SPACE {start}",
        *rules,
        *(TEXT, _SPACE, _NUMBER),
        others=others,
    )


def _up_to(number: int, *parts: str) -> str:
    return f"({' '.join(parts)}){{0,{number}}}" if number else ""


def after_thinking(grammar: str, spelling: Spelling, marks: Marks, is_open: bool) -> str:
    """Return a grammar of free thinking, the marks' gap, and then an answer that matches `grammar`."""
    return lark_grammar(
        f"start: {_thinking(spelling, marks, is_open, marks.gap)} {spelling(marks.lead)} @answer",
        spelling.rule_up_to("thought", marks.close),
        TEXT,
        others=named("answer", grammar),
    )


def _thinking(spelling: Spelling, marks: Marks | None, is_open: bool, gap: str = "") -> str:
    """Return the rule of the thinking: required where it `is_open`, else optional."""
    if marks is None:
        return ""
    thought = f"thought {spelling(gap)}"
    return thought if is_open else f"({spelling.any_of(marks.open)} {thought})?"
