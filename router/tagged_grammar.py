"""Grammars of arguments that are tagged parameters.

They are narrower than the schema where the text between two tags could be read as something else: parameters
come in the schema's order, and no string begins like a value of another type that its parameter may have.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from llguidance import LLMatcher

from protocol.errors import InvalidRequestError
from router.json_schemas import FORMATS, schema_grammar
from router.lark import Spelling, named, quoted
from router.parsing.parameters import as_json, resolved, types_of
from router.parsing.tagged import Tags
from router.regexes import ends_in_escape, from_ecma

MAX_OTHERS = 16
"""The most parameters of a call whose function names none but allows any."""
_OF_OBJECTS = (
    *("allOf", "anyOf", "oneOf", "not", "if", "const", "enum", "patternProperties", "propertyNames"),
    *("minProperties", "maxProperties", "dependentRequired", "dependentSchemas", "unevaluatedProperties"),
)
"""Keywords of a function's schema that no grammar of tagged parameters enforces."""
_OF_STRINGS = ("pattern", "format", "minLength", "maxLength")
_BEGINNINGS = {"integer": "[-+]?\\.?[0-9]", "number": "[-+]?\\.?[0-9]", "object": "\\{", "array": "\\["}
"""Beginnings of texts that the parser may read as a value of the type."""
_ATOM = re.compile(r"\\.|\[(?:\\.|[^\]\\])*\]|\([^()]*\)", re.DOTALL)
_ANY = "(.|\\n)*"
_NAME = "NAME: /[A-Za-z0-9_.\\-]+/"


class TaggedArguments:
    """The rules and grammars of a function's arguments. Their rule is `name`.

    Raises `InvalidRequestError`, which names function and keyword, if a strict function's keyword cannot be
    enforced; other functions' keywords are ignored then.
    """

    def __init__(self, name: str, tags: Tags, spelling: Spelling, function: str, strict: bool) -> None:
        self._name, self._function, self._strict = name, function, strict
        self._tags, self._spelling = tags, spelling
        self._root: Mapping[str, Any] = {}
        self.rules: list[str] = []
        self.others: list[Mapping[str, Any]] = []

    def add(self, schema: Mapping[str, Any]) -> None:
        """Add the rules of a function's schema."""
        self._root = schema
        schema = resolved(schema, schema) or {}
        self._check(schema, _OF_OBJECTS, "")
        required = [each for each in schema.get("required") or () if isinstance(each, str)]
        properties: dict[str, Any] = {**(schema.get("properties") or {})}
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
            raise InvalidRequestError("tools", f"{self._function}: {key}: {reason}")

    def _parameter(self, rule: str, key: str | None, schema: Any, path: str) -> None:
        """Add the rule of a parameter; `key` None: of any name."""
        tags, types = self._tags, types_of(schema, self._root)
        if key is not None and (tags.key_end in f"{key}{tags.key_end}"[:-1] or key != key.strip()):
            raise InvalidRequestError("tools", f"{self._function}: {path[:-1]}: cannot be the name of a tag")
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
        """Return the rule's part up to the value, of a string (0) or of JSON (1)."""
        tags = self._tags
        end = tags.key_end if tags.kinds is None else tags.kinds[kind]
        end += (tags.line + tags.value if tags.value else "") + tags.pad
        if key is None:
            return f"{self._spelling(tags.key)} NAME {self._spelling(end)}"
        return self._spelling(tags.key + key + end)

    def _add_json(self, rule: str, schema: Any, types: Sequence[str] | None, path: str) -> None:
        """Add the grammar of a value in JSON, only of some `types` if the parameter may be a string too."""
        definitions = {key: self._root[key] for key in ("$defs", "definitions") if key in self._root}
        narrow = schema if types is None else {"allOf": [schema], "type": list(types)}
        try:
            text = schema_grammar({**narrow, **definitions}, path[:-1], lenient=not self._strict)
        except InvalidRequestError as error:
            raise InvalidRequestError("tools", f"{self._function}: {error.field}.{error.message}") from error
        self.others += named(f"{rule}_json", text)

    # --- strings ------------------------------------------------------------------------------------------

    def _texts(self, rule: str, schema: Any, path: str) -> Iterator[str]:
        """Yield what a string may be, each with the tag after it."""
        tags = self._tags
        others = [each for each in types_of(schema, self._root) if each in _BEGINNINGS]
        for number, (text, conditions) in enumerate(self._strings(schema, path)):
            if text is not None:
                yield f"{self._spelling(text + tags.pad + tags.value_end)}"
                continue
            if tags.kinds is None:
                conditions += [f"~/[ \\t\\r\\n]*{_BEGINNINGS[each]}{_ANY}/" for each in others]
            terminal = f"{rule}_{number}".upper()
            self.rules.append(f"{terminal}: {' & '.join(['FREE', *conditions])}")
            self.rules.append(
                self._spelling.rule_up_to(f"{rule}_{number}", [tags.pad + tags.value_end], terminal)
            )
            yield f"{rule}_{number}"

    def _strings(self, schema: Any, path: str) -> Iterator[tuple[str | None, list[str]]]:
        """Yield the strings that a schema allows: a text, or None with conditions on a free text."""
        schema = resolved(schema, self._root)
        if not isinstance(schema, dict):
            yield None, []
            return
        self._check(schema, ("not", "if"), path)
        given = schema["enum"] if isinstance(schema.get("enum"), list) else None
        given = [schema["const"]] if "const" in schema else given
        combined = [key for key in ("anyOf", "oneOf", "allOf") if key in schema]
        if given is not None:
            self._check(schema, (*_OF_STRINGS, *combined), path)
            types = types_of(schema, self._root)
            for value in given:
                if isinstance(value, str) and self._is_told(value, types, path):
                    yield value, []
        elif combined:
            self._check(schema, (*_OF_STRINGS, *combined[1:]), path)
            (key, *_), choices = combined, schema[combined[0]]
            if key == "allOf" and len(choices) > 1:
                self._check(schema, ("allOf",), path)
            for number, choice in enumerate(choices):
                if "string" in types_of(choice, self._root):
                    yield from self._strings(choice, f"{path}{key}.{number}.")
        else:
            yield None, list(self._conditions(schema, path))

    def _is_told(self, text: str, types: Sequence[str], path: str) -> bool:
        """Whether a text is read as this string."""
        if self._tags.value_end in text:
            raise InvalidRequestError("tools", f"{self._function}: {path}enum: {text!r} ends the parameter")
        return self._tags.kinds is not None or as_json(text, types).startswith('"')

    def _conditions(self, schema: Mapping[str, Any], path: str) -> Iterator[str]:
        least, most = schema.get("minLength", 0), schema.get("maxLength", "")
        if least or most != "":
            yield f"/(.|\\n){{{least},{most}}}/"
        if isinstance(pattern := schema.get("pattern"), str):
            yield from self._matching(pattern, f"{path}pattern")
        if isinstance(wanted := schema.get("format"), str):
            if wanted in FORMATS:
                yield from self._matching(FORMATS[wanted], f"{path}format")
            else:
                self._cannot(
                    f"{path}format", f"{wanted!r} cannot be enforced in the format of this model's calls"
                )

    def _matching(self, pattern: str, key: str) -> Iterator[str]:
        """Yield a regular expression of texts in which the pattern is found."""
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
            self._cannot(key, problem)
            return
        yield f"/{_SLASH.sub(_escaped, regex)}/"


_SLASH = re.compile(r"\\.|/|\n", re.DOTALL)


def _escaped(match: re.Match[str]) -> str:
    return {"/": "\\/", "\n": "\\n"}.get(match[0], match[0])


def shared_rules(tags: Tags) -> list[str]:
    """Return the terminals that the rules of all functions use."""
    return [f"FREE: TEXT & ~(TEXT {quoted(tags.value_end)} TEXT)", _NAME]
