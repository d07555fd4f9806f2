"""The types of a function's parameters, which decide how values without quotes become JSON."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

STRING = ("string",)
_TYPES = (
    (type(None), "null"),
    (bool, "boolean"),
    (int, "integer"),
    (float, "number"),
    (str, "string"),
    (list, "array"),
    (dict, "object"),
)
_INTEGER = re.compile(r"[-+]?[0-9]{1,300}")
COMBINED = ("anyOf", "oneOf", "allOf")
_MAX_REFERENCES = 16
"""Most references to follow; longer chains count as unknown."""


class Parameters(msgspec.Struct, frozen=True):
    """The types that each parameter may have, and the types of parameters that the schema does not name."""

    types: dict[str, Sequence[str]] = {}
    others: Sequence[str] = STRING

    def of(self, name: str) -> Sequence[str]:
        return self.types.get(name, self.others)


def parameters_of(schema: Mapping[str, Any] | None) -> Parameters:
    """Return the types of a function's parameters; strings if the schema tells no types."""
    root = schema or {}
    schema = function_schema(root)
    properties, others = schema.get("properties"), schema.get("additionalProperties")
    named = properties.items() if isinstance(properties, dict) else ()
    return Parameters(
        {name: types_of(each, root) for name, each in named},
        types_of(others, root) if isinstance(others, dict) else STRING,
    )


def function_schema(root: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the schema of a function's parameters, following references within `root`."""
    schema = resolved(root, root)
    return schema if isinstance(schema, dict) else {}


def types_of(schema: Any, root: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of all types in a schema; `string` if it has none."""
    return tuple(sorted(_type_names(schema, root, set()))) or STRING


def _type_names(schema: Any, root: Mapping[str, Any], seen: set[int]) -> set[str]:
    schema = resolved(schema, root)
    if id(schema) in seen:
        return set()
    if not isinstance(schema, dict):
        return {"string"}
    seen.add(id(schema))
    types, values = schema.get("type"), schema.get("enum")
    found = {each for each in (types if isinstance(types, list) else [types]) if isinstance(each, str)}
    values = [*values] if isinstance(values, list) else []
    found.update(type_name(value) for value in [*values, *([schema["const"]] if "const" in schema else [])])
    for key in COMBINED:
        choices = schema.get(key)
        for choice in choices if isinstance(choices, list) else ():
            found |= _type_names(choice, root, seen)
    return found or {"string"}


def resolved(schema: Any, root: Mapping[str, Any]) -> Any:
    """Return the target of a schema that is a reference within `root`; other schemas unchanged."""
    for _ in range(_MAX_REFERENCES):
        reference = schema.get("$ref") if isinstance(schema, dict) else None
        if not isinstance(reference, str) or not reference.startswith("#"):
            break
        schema = pointed(reference, root)
    return schema


def pointed(reference: str, root: Mapping[str, Any]) -> Any:
    """Return the schema at a pointer (`#/...`) within `root`; None if it does not exist or is an anchor."""
    if reference.partition("/")[0] != "#":
        return None
    schema: Any = root
    for step in reference.split("/")[1:]:
        step = step.replace("~1", "/").replace("~0", "~")
        schema = schema.get(step) if isinstance(schema, dict) else None
    return schema


def type_name(value: Any) -> str:
    return next(name for kind, name in _TYPES if isinstance(value, kind))


def as_json(text: str, types: Sequence[str]) -> str:
    """Return a value as JSON: unchanged if it is JSON of one of the `types`, else converted to the first type
    that fits. A text that fits none stays unchanged if it is JSON, else it becomes a string.
    """
    spelled = text.strip(" \t\r\n")
    name = _json_type(spelled)
    for each in _BY_PRIORITY:
        if each not in types:
            continue
        if each == "string":
            return json.dumps(text, ensure_ascii=False)
        if name == each or (name, each) == ("integer", "number"):
            return spelled
        if (converted := _converted(spelled, each)) is not None:
            return converted
    if spelled == "None" and "null" in types:
        return "null"
    return json.dumps(text, ensure_ascii=False) if name is None else spelled


_BY_PRIORITY = ("null", "integer", "number", "boolean", "object", "array", "string")
_WORDS = {"null": {"null": "null"}, "boolean": {"true": "true", "1": "true", "false": "false", "0": "false"}}


def _converted(text: str, to: str) -> str | None:
    """Return JSON of type `to` for a text in another spelling, such as Python's; None if it does not fit."""
    if to == "integer" and _INTEGER.fullmatch(text):
        return str(int(text))
    if to == "number" and text[:1] in "+-.0123456789":
        try:
            return json.dumps(_finite(text))
        except ValueError:
            return None
    return _WORDS.get(to, {}).get(text.lower())


def _json_type(text: str) -> str | None:
    try:
        return type_name(json.loads(text, parse_constant=_refuse, parse_float=_finite))
    except (ValueError, RecursionError):
        return None


def _refuse(text: str) -> None:
    raise ValueError(text)


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(text)
    return number
