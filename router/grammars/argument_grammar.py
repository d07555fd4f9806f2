"""Grammars of a call's arguments in Python's or Gemma's notation, from the function's JSON schema."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from protocol.errors import InvalidRequestError
from router.grammars.json_schemas import schema_grammar
from router.grammars.lark import TEXT, Spelling, lark_grammar, named, quoted
from router.parsing.literals import Literals
from router.parsing.parameters import pointed, type_name

_ANNOTATIONS = {"$comment", "$defs", "$id", "$schema", "default", "definitions", "deprecated", "description"}
_ANNOTATIONS |= {"examples", "readOnly", "title", "writeOnly", "x-guidance"}
_KEYWORDS = {
    "string": ("minLength", "maxLength"),
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    "array": ("items", "minItems", "maxItems"),
    "object": ("properties", "required", "additionalProperties"),
    "boolean": (),
    "null": (),
}
"""Keywords that can be enforced, by the type that they constrain."""
_NAME = re.compile(r"[^\s=:,()\[\]{}\"'<](?:[^\s=:,()\[\]{}]| (?=[^\s=:,()\[\]{}]))*")
"""A key that can be written without quotes."""
_ANY_NAME = "/[A-Za-z_][A-Za-z0-9_.\\-]{0,63}/"
_ANY_KEY = '/[^"\\\\\\x00-\\x1f\\x7f]{0,64}/'
_ESCAPES = {"x-guidance": {"json_allowed_escapes": 'nrbtf\\"u'}}
"""The JSON escapes that Python's strings have too."""


def argument_grammar(
    name: str, schema: Mapping[str, Any], notation: Literals, spelling: Spelling, *, lenient: bool
) -> list[dict[str, Any]]:
    """Return the grammar of a function's arguments, under this `name`, and the grammars that it refers to.

    Raises `InvalidRequestError` for a keyword that cannot be enforced; a lenient grammar ignores it.
    """
    rules = _Rules(name, schema, notation, spelling, lenient)
    try:
        start = rules.members(schema, "", is_call=True)
    except (AttributeError, RecursionError, TypeError, ValueError) as error:
        raise InvalidRequestError("tools", f"no JSON schema: {error}") from error
    return named(name, lark_grammar(f"start: {start}", *rules.lines, TEXT, others=rules.others))


class _Rules:
    """The rules of one function's grammar."""

    def __init__(
        self,
        name: str,
        root: Mapping[str, Any],
        notation: Literals,
        spelling: Spelling,
        lenient: bool,
    ) -> None:
        self.lines: list[str] = []
        self.others: list[dict[str, Any]] = []
        self._name, self._root, self._lenient = name, root, lenient
        self._is_python = notation.has_escapes
        self._assign = notation.assign
        self._comma = quoted(", " if self._is_python else ",")
        self._quote = spelling(notation.quotes[0])
        self._spelling, self._mark = spelling, notation.quotes[0]
        self._constants = ("True", "False", "None") if self._is_python else ("true", "false", "null")
        self._made: dict[str, str] = {}
        """Names of rules and grammars by content, so that equal ones are made once."""

    def members(self, node: Mapping[str, Any], path: str, *, is_call: bool = False) -> str:
        """Return a rule for the members of an object, or for the arguments of a call."""
        node = self._checked(node, path, ("type", *_KEYWORDS["object"]))
        properties = dict(node.get("properties") or {})
        additional = node.get("additionalProperties", True)
        required = [key for key in node.get("required") or () if isinstance(key, str)]
        properties.update((key, additional) for key in required if key not in properties)
        members = []
        for key, value in properties.items():
            if (is_call or not self._is_python) and not _NAME.fullmatch(key):
                self._cannot(f"{path}properties", f"{key!r} cannot be the name of an argument")
                continue
            start = quoted(self._key(key, is_call))
            members.append((f"{start} {self.value(value, f'{path}properties.{key}.')}", key in required))
        other_member = ""
        if additional is not False:
            other_member = self._other_member(properties, additional, f"{path}additionalProperties.", is_call)
        return self._in_turn(members, other_member)

    def _key(self, key: str, is_call: bool) -> str:
        if is_call:
            return f"{key}{self._assign}"
        return f"{json.dumps(key, ensure_ascii=False)}: " if self._is_python else f"{key}:"

    def _other_member(self, known: Iterable[str], value: Any, path: str, is_call: bool) -> str:
        """Return a rule for a member whose name is not among `known`."""
        before, name, after = "", _ANY_NAME, self._assign
        if self._is_python and not is_call:
            before, name, after = '"\\"" ', _ANY_KEY, '": '
        others = " | ".join(map(quoted, known))
        terminal = self._rule(f"{name} & ~({others})" if others else name, is_terminal=True)
        return self._rule(f"{before}{terminal} {quoted(after)} {self.value(value, path)}")

    def _in_turn(self, members: Sequence[tuple[str, bool]], other_member: str) -> str:
        """Return a rule for members in order, each with whether it is required, then `other_member` ones."""
        first = f"({other_member} ({self._comma} {other_member})*)?" if other_member else '""'
        rest = f"({self._comma} {other_member})*" if other_member else '""'
        for member, is_required in reversed(members):
            after = self._rule(rest)
            first = f"{member} {after}" if is_required else f"{member} {after} | {self._rule(first)}"
            rest = f"{self._comma} {member} {after}" if is_required else f"({self._comma} {member})? {after}"
        return self._rule(first)

    def value(self, node: Any, path: str) -> str:
        """Return a rule for the values that satisfy a schema."""
        if node is True or node == {}:
            return self._any()
        if not isinstance(node, dict):
            raise self._error(path.rstrip("."), "no value satisfies it")
        if isinstance(ref := node.get("$ref"), str):
            self._checked(node, path, ("$ref",))
            return self._ref(ref, path)
        if "enum" in node or "const" in node:
            node = self._checked(node, path, ("enum", "const", "type"))
            values = node["enum"] if "enum" in node else [node["const"]]
            texts = [self._literal(each, path) for each in values if _is_of(each, node.get("type"))]
            return self._rule(" | ".join(texts) or self._unsatisfiable(path))
        if isinstance(options := node.get("anyOf"), list):
            self._checked(node, path, ("anyOf", "type"))
            texts = [self.value(each, f"{path}anyOf[{number}].") for number, each in enumerate(options)]
            return self._rule(" | ".join(texts))
        types = node.get("type")
        if isinstance(types, list):
            each_type = [self.value(_for_type(node, each), path) for each in types]
            return self._rule(" | ".join(each_type))
        if types is None:
            found = (kind for kind, words in _KEYWORDS.items() if any(word in node for word in words))
            types = next(found, None)
        return self._typed(node, types, path)

    def _typed(self, node: Mapping[str, Any], kind: str | None, path: str) -> str:
        if kind is None:
            self._checked(node, path, ())
            return self._any()
        group = "number" if kind == "integer" else kind
        if group not in _KEYWORDS:
            raise self._error(f"{path}type", f"must be one of JSON's, got {kind!r}")
        texts = ("pattern", "format") if kind == "string" and self._is_python else ()
        node = self._checked(node, path, ("type", *_KEYWORDS[group], *texts))
        match group:
            case "object":
                return self._rule(f'"{{" {self.members(node, path)} "}}"')
            case "array":
                return self._array(node, path)
            case "boolean":
                return self._rule(" | ".join(map(quoted, self._constants[:2])))
            case "null":
                return quoted(self._constants[2])
            case "string" if not self._is_python:
                return self._raw_string(node)
        fields = {key: value for key, value in node.items() if key not in _ANNOTATIONS}
        return self._json({**fields, "type": kind, **(_ESCAPES if kind == "string" else {})})

    def _array(self, node: Mapping[str, Any], path: str) -> str:
        item = self.value(node.get("items", True), f"{path}items.")
        least, most = node.get("minItems") or 0, node.get("maxItems")
        if most is not None and (most < least or most == 0):
            return '"[]"' if least == 0 else self._unsatisfiable(path)
        rest = f"({self._comma} {item}){{{max(least - 1, 0)},{'' if most is None else most - 1}}}"
        rest = "" if most == 1 else rest
        items = f"{item} {rest}" if least else f"({item} {rest})?"
        return self._rule(f'"[" {items} "]"')

    def _raw_string(self, node: Mapping[str, Any]) -> str:
        """Return a rule for a string without escapes, up to its closing mark."""
        least, most = node.get("minLength") or 0, node.get("maxLength")
        length = f"{{{least},{'' if most is None else most}}}"
        text = self._rule(f"/(.|\\n){length}/ & ~(TEXT {quoted(self._mark)} TEXT)", is_terminal=True)
        if text.lower() not in self._made:
            self._made[text.lower()] = name = self._new()
            self.lines.append(self._spelling.rule_up_to(name, [self._mark], text))
        return f"{self._quote} {self._made[text.lower()]}"

    def _any(self) -> str:
        if "any" not in self._made:
            name = self._made["any"] = self._new()
            string = self._typed({}, "string", "")
            number = self._typed({}, "number", "")
            key = f"{self._other_member((), {}, '', False)}"
            constants = " | ".join(map(quoted, self._constants))
            items, members = (f"({each} ({self._comma} {each})*)?" for each in (name, key))
            self.lines.append(
                f'{name}: {string} | {number} | {constants} | "[" {items} "]" | "{{" {members} "}}"'
            )
        return self._made["any"]

    def _ref(self, ref: str, path: str) -> str:
        if ref in self._made:
            return self._made[ref]
        node = pointed(ref, self._root)
        if node is None:
            raise self._error(f"{path}$ref", f"there is no {ref!r}")
        name = self._made[ref] = self._new()
        self.lines.append(f"{name}: {self.value(node, f'{ref}.')}")
        return name

    def _literal(self, value: Any, path: str) -> str:
        match value:
            case str() if not self._is_python:
                if self._mark in value:
                    raise self._error(path.rstrip("."), f"no string can contain {self._mark}")
                text = f" {quoted(value)}" if value else ""
                return f"{self._quote}{text} {self._quote}"
            case list():
                return f'"[" {f" {self._comma} ".join(self._literal(each, path) for each in value)} "]"'
            case dict():
                members = (
                    f"{quoted(self._key(key, False))} {self._literal(each, path)}"
                    for key, each in value.items()
                )
                return f'"{{" {f" {self._comma} ".join(members)} "}}"'
            case bool() | None:
                return quoted(self._constants[2 if value is None else not value])
        return quoted(json.dumps(value, ensure_ascii=False))

    def _rule(self, body: str, *, is_terminal: bool = False) -> str:
        """Return the name of a rule with this body, made once."""
        if body not in self._made:
            self._made[body] = name = self._new().upper() if is_terminal else self._new()
            self.lines.append(f"{name}: {body}")
        return self._made[body]

    def _new(self) -> str:
        return f"r{len(self._made)}"

    def _json(self, schema: Mapping[str, Any]) -> str:
        """Return the name of a grammar for JSON that satisfies a schema."""
        key = json.dumps(schema, sort_keys=True)
        if key not in self._made:
            name = f"{self._name}_{len(self._made)}"
            self._made[key] = f"@{name}"
            self.others += named(name, schema_grammar(schema, "tools", lenient=self._lenient))
        return self._made[key]

    def _checked(self, node: Mapping[str, Any], path: str, known: Sequence[str]) -> Mapping[str, Any]:
        """Return the node without keywords that cannot be enforced. Raises `InvalidRequestError` for them."""
        for key in node:
            if key not in known and key not in _ANNOTATIONS:
                self._cannot(f"{path}{key}", "this model's form of calls cannot keep to it")
        return {key: value for key, value in node.items() if key in known}

    def _cannot(self, at: str, reason: str) -> None:
        if not self._lenient:
            raise self._error(at, reason)

    def _error(self, at: str, reason: str) -> InvalidRequestError:
        return InvalidRequestError("tools", f"{at}: {reason}")

    def _unsatisfiable(self, path: str) -> str:
        raise self._error(path.rstrip("."), "no value satisfies it")


def _for_type(node: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """Return the schema of one of a node's types, with the keywords that apply to it."""
    group = "number" if kind == "integer" else kind
    others = {word for each, words in _KEYWORDS.items() if each != group for word in words}
    others.update(("pattern", "format") if kind != "string" else ())
    return {**{key: value for key, value in node.items() if key not in others}, "type": kind}


def _is_of(value: Any, types: Any) -> bool:
    if types is None:
        return True
    kind, wanted = type_name(value), types if isinstance(types, list) else [types]
    return kind in wanted or (kind == "integer" and "number" in wanted)
