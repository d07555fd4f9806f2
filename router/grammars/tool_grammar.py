"""Grammars of answers that call functions in the model's own format, after their thinking.

Where the text between two tags would be ambiguous, grammars of tagged parameters are narrower than the
schema: parameters come in the schema's order, and no string begins like a value of another type of its
parameter.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec
from llguidance import LLMatcher

from protocol.errors import InvalidRequestError
from router.grammars.argument_grammar import argument_grammar
from router.grammars.json_schemas import FORMATS, check_references, ends_in_escape, from_ecma, schema_grammar
from router.grammars.lark import TEXT, Spelling, lark_grammar, named, quoted
from router.parsing.formats import CallForm
from router.parsing.parameters import COMBINED, as_json, function_schema, resolved, types_of
from router.parsing.reasoning import Marks
from router.parsing.tagged import Tags

MAX_OTHERS = 16
"""Most parameters of a call whose function names no parameter but allows any."""
_OF_OBJECTS = (
    *("allOf", "anyOf", "oneOf", "not", "if", "const", "enum", "patternProperties", "propertyNames"),
    *("minProperties", "maxProperties", "dependentRequired", "dependentSchemas", "unevaluatedProperties"),
)
"""Keywords of a function's schema that grammars of tagged parameters do not enforce."""
_OF_STRINGS = ("pattern", "format", "minLength", "maxLength")
_WORDS = {"null": ("null",), "boolean": ("true", "false")}
_BEGINNINGS = {"integer": "[-+]?\\.?[0-9]", "number": "[-+]?\\.?[0-9]", "object": "\\{", "array": "\\["}
"""Regular expressions for the beginning of texts that the parser may read as a value of the type."""
_LABEL = "[a-zA-Z0-9](?:[a-zA-Z0-9-]{0,61}[a-zA-Z0-9])?"
_LOCAL = "[a-zA-Z0-9_%+-]{1,30}"
_BYTE = "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_FORMATS = {
    **FORMATS,
    "email": rf"^{_LOCAL}(?:\.{_LOCAL})?@{_LABEL}(?:\.{_LABEL}){{1,3}}$",
    "hostname": rf"^{_LABEL}(?:\.{_LABEL}){{0,3}}$",
    "ipv4": rf"^{_BYTE}(?:\.{_BYTE}){{3}}$",
    "uuid": "^[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}$",
}
_ATOM = re.compile(r"\\.|\[(?:\\.|[^\]\\])*\]|\([^()]*\)", re.DOTALL)
_ANY = "(.|\\n)*"
PARAMETER_NAME = "NAME: /[A-Za-z0-9_.\\-]+/"


class TaggedArguments:
    """The rules and grammars of a function's arguments; the top rule is `name`.

    A `strict` function raises `InvalidRequestError` for keywords that cannot be enforced; others ignore them.
    """

    def __init__(
        self, name: str, schema: Mapping[str, Any], tags: Tags, spelling: Spelling, strict: bool
    ) -> None:
        self._name, self._root, self._strict = name, schema, strict
        self._tags, self._spelling = tags, spelling
        self.rules: list[str] = []
        self.others: list[Mapping[str, Any]] = []
        self._add(function_schema(schema))

    def _add(self, schema: Mapping[str, Any]) -> None:
        self._check(schema, _OF_OBJECTS, "")
        required, properties = schema.get("required"), schema.get("properties")
        required = [each for each in required if isinstance(each, str)] if isinstance(required, list) else []
        properties = {**properties} if isinstance(properties, dict) else {}
        for key in required:
            properties.setdefault(key, {})
        parts = []
        for number, (key, each) in enumerate(properties.items()):
            rule = f"{self._name}_{number}"
            if each is not False:
                self._parameter(rule, key, each, f"properties.{key}.")
                parts.append(rule if key in required else f"{rule}?")
        others = schema.get("additionalProperties")
        if not properties and others is not False:
            self._parameter(f"{self._name}_other", None, others, "additionalProperties.")
            parts.append(f"{self._name}_other{{0,{MAX_OTHERS}}}")
        self.rules.append(f"{self._name}: {' '.join(parts) or quoted('')}")

    def _check(self, schema: Mapping[str, Any], keywords: Sequence[str], path: str) -> None:
        for key in keywords:
            if key in schema:
                self._cannot(f"{path}{key}", "cannot be enforced in the format of this model's calls")

    def _cannot(self, key: str, reason: str) -> None:
        if self._strict:
            raise InvalidRequestError("tools", f"{key}: {reason}")

    def _parameter(self, rule: str, key: str | None, schema: Any, path: str) -> None:
        """Add the rule of a parameter; `key` None: a parameter of any name."""
        tags, types = self._tags, types_of(schema, self._root)
        if key is not None and (tags.key_end in f"{key}{tags.key_end}"[:-1] or key != key.strip()):
            raise InvalidRequestError("tools", f"{path[:-1]}: cannot be the name of a tag")
        texts = list(self._texts(rule, schema, path)) if "string" in types else []
        is_free = tags.kinds is None and any(text.startswith(rule) for text in texts)
        plain = ("string", "null", "boolean") if is_free else ("string",)
        rest = [each for each in types if each not in plain]
        choices = [f"{self._head(key, 0)} ({' | '.join(texts)})"] if texts else []
        if rest:
            self._add_json(rule, schema, rest if "string" in types else None, path)
            choices.append(f"{self._head(key, 1)} @{rule}_json {self._spelling(tags.pad + tags.value_end)}")
        self.rules.append(f"{rule}: ({' | '.join(choices)}) {self._spelling(tags.line)}")

    def _head(self, key: str | None, kind: int) -> str:
        """Return the part of a parameter's rule before the value; `kind` 0: a string, 1: JSON."""
        tags = self._tags
        end = tags.key_end if tags.kinds is None else tags.kinds[kind]
        end += (tags.line + tags.value if tags.value else "") + tags.pad
        if key is None:
            return f"{self._spelling(tags.key)} NAME {self._spelling(end)}"
        return self._spelling(tags.key + key + end)

    def _add_json(self, rule: str, schema: Any, types: Sequence[str] | None, path: str) -> None:
        """Add the grammar of a JSON value, limited to `types` if the parameter may be a string too."""
        definitions = {key: self._root[key] for key in ("$defs", "definitions") if key in self._root}
        schema = resolved(schema, self._root)
        narrow = schema if types is None else {"allOf": [schema], "type": list(types)}
        try:
            text = schema_grammar({**narrow, **definitions}, "tools", lenient=not self._strict)
        except InvalidRequestError as error:
            raise InvalidRequestError("tools", f"{path}{error.message}") from error
        self.others += named(f"{rule}_json", text)

    def _texts(self, rule: str, schema: Any, path: str) -> Iterator[str]:
        """Yield rules for the strings that a parameter may be, each with its end tag."""
        tags, types = self._tags, types_of(schema, self._root)
        for number, (text, conditions) in enumerate(self._strings(schema, path, set())):
            if text is not None:
                if self._reads_as_string(text, types, path):
                    yield self._spelling(text + tags.pad + tags.value_end)
                continue
            words: list[str] = []
            if tags.kinds is None:
                words = [f'"{word}"' for each in types for word in _WORDS.get(each, ()) if conditions]
                begins = [_BEGINNINGS[each] for each in types if each in _BEGINNINGS]
                conditions += [f"~/[ \\t\\r\\n]*{begin}{_ANY}/" for begin in begins]
            terminal = f"{rule}_{number}".upper()
            self.rules.append(f"{terminal}: {' | '.join([' & '.join(['FREE', *conditions]), *words])}")
            ends = [tags.pad + tags.value_end]
            self.rules.append(self._spelling.rule_up_to(f"{rule}_{number}", ends, terminal))
            yield f"{rule}_{number}"

    def _strings(self, schema: Any, path: str, seen: set[int]) -> Iterator[tuple[str | None, list[str]]]:
        """Yield the strings that a schema allows: a fixed text, or None with conditions on free text."""
        schema = resolved(schema, self._root)
        if id(schema) in seen:
            return
        if not isinstance(schema, dict):
            yield None, []
            return
        seen.add(id(schema))
        self._check(schema, ("not", "if"), path)
        allowed = schema["enum"] if isinstance(schema.get("enum"), list) else None
        allowed = [schema["const"]] if "const" in schema else allowed
        combined = [key for key in COMBINED if isinstance(schema.get(key), list)]
        if allowed is not None:
            self._check(schema, (*_OF_STRINGS, *combined), path)
            yield from ((value, []) for value in allowed if isinstance(value, str))
        elif combined:
            self._check(schema, (*_OF_STRINGS, *combined[1:]), path)
            (key, *_), choices = combined, schema[combined[0]]
            if key == "allOf" and len(choices) > 1:
                self._check(schema, ("allOf",), path)
            for number, choice in enumerate(choices):
                if "string" in types_of(choice, self._root):
                    yield from self._strings(choice, f"{path}{key}.{number}.", seen)
        else:
            yield None, list(self._conditions(schema, path))

    def _reads_as_string(self, text: str, types: Sequence[str], path: str) -> bool:
        """Return whether the parser reads `text` as a string. Raises if it contains the end tag."""
        if self._tags.value_end in text:
            raise InvalidRequestError("tools", f"{path}enum: {text!r} ends the parameter")
        return self._tags.kinds is not None or as_json(text, types).startswith('"')

    def _conditions(self, schema: Mapping[str, Any], path: str) -> Iterator[str]:
        least, most = schema.get("minLength", 0), schema.get("maxLength", "")
        if isinstance(least, int) and (isinstance(most, int) or least):
            yield f"/{_ANY[:-1]}{{{least},{most}}}/"
        if isinstance(pattern := schema.get("pattern"), str):
            yield from self._matching(pattern, f"{path}pattern")
        if isinstance(wanted := schema.get("format"), str):
            if wanted in _FORMATS:
                yield from self._matching(_FORMATS[wanted], f"{path}format")
            else:
                self._cannot(
                    f"{path}format", f"{wanted!r} cannot be enforced in the format of this model's calls"
                )

    def _matching(self, pattern: str, key: str) -> Iterator[str]:
        """Yield a regular expression for texts that contain a match of the pattern."""
        inner = pattern.removeprefix("^")
        ends = inner.endswith("$") and not ends_in_escape(inner[:-1])
        inner = inner[:-1] if ends else inner
        bare = inner
        while (shorter := _ATOM.sub("", bare)) != bare:
            bare = shorter
        if ends_in_escape(pattern) or (inner != pattern and "|" in bare):
            self._cannot(key, "its anchors cannot be enforced")
            return
        before, after = ("" if held else _ANY for held in (pattern.startswith("^"), ends))
        regex = f"{before}({from_ecma(inner)}){after}"
        if problem := LLMatcher.validate_grammar(LLMatcher.grammar_from_regex(regex)):
            self._cannot(key, problem.strip().rpartition("error: ")[2].partition("\n")[0])
            return
        yield f"/{_SLASH.sub(_escaped, regex)}/"


_SLASH = re.compile(r"\\.|/|\n", re.DOTALL)


def _escaped(match: re.Match[str]) -> str:
    return {"/": "\\/", "\n": "\\n"}.get(match[0], match[0])


_NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}
MAX_CALLS = 16
"""Most calls of an answer whose calls have a grammar: a model might never end by itself."""
_NUMBER = "NUMBER: /[0-9]{1,4}/"
_SPACE = "SPACE: /[ \\t\\r\\n]{0,4}/"


class OfferedFunction(msgspec.Struct, frozen=True):
    """A function that may be called. Only a `strict` function refuses keywords that cannot be enforced."""

    name: str
    schema: dict[str, Any] | None
    strict: bool


def tool_grammar(
    form: CallForm,
    offers: Sequence[OfferedFunction],
    spelling: Spelling,
    *,
    demanded: bool,
    several: bool,
    marks: Marks | None = None,
    is_open: bool = False,
) -> str:
    """Return the grammar of calls alone if they are `demanded`, else of text that may contain calls."""
    numbers = range(len(offers))
    more_calls = MAX_CALLS - 1 if several else 0
    again = "" if form.separator is None else _up_to(more_calls, spelling(form.separator), "call")
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
            start += _up_to(more_calls, spelling(form.between), trigger, "block")
    elif form.trigger:
        rules += [
            spelling.rule_up_to("head", [form.trigger], "PLAIN"),
            f"PLAIN: TEXT {'& ~(TEXT CALL TEXT)' if form.elsewhere else ''}",
            f"REST: PLAIN & ~(TEXT {quoted(form.trigger)} TEXT)",
        ]
        start = _up_to(more_calls + 1, "head", "block")
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
    """Return a grammar for free thinking, the marks' gap, and an answer that matches `grammar`."""
    return lark_grammar(
        f"start: {_thinking(spelling, marks, is_open, marks.gap)} {spelling(marks.lead)} @answer",
        spelling.rule_up_to("thought", marks.close),
        TEXT,
        others=named("answer", grammar),
    )


def _thinking(spelling: Spelling, marks: Marks | None, is_open: bool, gap: str = "") -> str:
    """Return the rule of the thinking, required if the prompt began it (`is_open`), else optional."""
    if marks is None:
        return ""
    thought = f"thought {spelling(gap)}"
    return thought if is_open else f"({spelling.any_of(marks.open)} {thought})?"
