"""From `response_format` and `structured_outputs` to one grammar, written as llguidance reads it.

This runs in the preprocessor alone, as it has no bound.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, NamedTuple

import msgspec
from llguidance import LLMatcher, StructTag
from msgspec import Raw

from protocol.errors import InvalidRequestError
from router.decoding import decode_field
from router.gbnf import is_gbnf, lark_from_gbnf
from router.grammar_request import GrammarRequest
from router.json_schemas import schema_grammar
from router.lark import lark_grammar, quoted, with_narrow_schemas
from router.openai_types import MAX_RAW_BYTES, ResponseFormat, StructuredOutputs

_ANY_OBJECT = Raw(b'{"type":"object"}')
_KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")


class Grammar(NamedTuple):
    """`field` is the request's that asks for it."""

    text: str
    field: str


def requested_grammar(request: GrammarRequest, special_tokens: Collection[str]) -> Grammar | None:
    """Raises `InvalidRequestError`. Whether the grammar is valid is left to who compiles it."""
    formatted = _of_response_format(request.response_format, special_tokens)
    structured = _of_structured_outputs(request.structured_outputs, special_tokens)
    if formatted is not None and structured is not None:
        raise InvalidRequestError("structured_outputs", "not together with response_format")
    return formatted or structured


def _of_response_format(wanted: ResponseFormat | None, special_tokens: Collection[str]) -> Grammar | None:
    if wanted is None or wanted.type == "text":
        return None
    field = "response_format"
    if wanted.type == "json_object":
        return Grammar(_of_schema(_ANY_OBJECT, field), field)
    if wanted.type == "structural_tag":
        tags = msgspec.json.encode({"structures": wanted.structures, "triggers": wanted.triggers})
        return Grammar(_of_tags(tags, field, special_tokens), field)
    if wanted.type != "json_schema":
        kinds = "text, json_object, json_schema or structural_tag"
        raise InvalidRequestError("response_format.type", f"must be {kinds}, got {wanted.type!r}")
    field = "response_format.json_schema"
    if wanted.json_schema is None:
        raise InvalidRequestError(field, "is required with the type json_schema")
    field += ".schema"
    return Grammar(_of_schema(wanted.json_schema.schema, field), field)


def _of_structured_outputs(
    wanted: StructuredOutputs | None, special_tokens: Collection[str]
) -> Grammar | None:
    if wanted is None:
        return None
    given = [name for name in _KINDS if _is_given(getattr(wanted, name))]
    if len(given) != 1:
        found = " and ".join(given) or "none"
        raise InvalidRequestError("structured_outputs", f"one of {', '.join(_KINDS)}, got {found}")
    (kind,) = given
    field = f"structured_outputs.{kind}"
    _check_size(
        sum(map(len, wanted.choice or ())) + len((wanted.grammar or wanted.regex or "").encode()), field
    )
    match kind:
        case "json":
            text = _of_schema(wanted.json, field, wanted.whitespace_pattern)
        case "json_object":
            text = _of_schema(_ANY_OBJECT, field, wanted.whitespace_pattern)
        case "regex":
            text = LLMatcher.grammar_from_regex(wanted.regex or "")
        case "choice":
            text = lark_grammar("start: " + " | ".join(map(quoted, wanted.choice or ())))
        case "grammar":
            text = _of_grammar(wanted.grammar or "", field)
        case _:
            text = _of_tags(bytes(wanted.structural_tag), field, special_tokens)
    return Grammar(text, field)


def _is_given(value: Any) -> bool:
    return bytes(value) not in (b"", b"null") if isinstance(value, Raw) else bool(value)


def _check_size(size: int, field: str) -> None:
    if size > MAX_RAW_BYTES:
        raise InvalidRequestError(field, f"at most {MAX_RAW_BYTES} bytes, got {size}")


def _of_schema(raw: Raw, field: str, whitespace_pattern: str | None = None) -> str:
    _check_size(len(bytes(raw)), field)
    schema = _unquoted(raw, field)
    if not isinstance(schema, dict):
        raise InvalidRequestError(field, f"must be a JSON schema, got {type(schema).__name__}")
    return schema_grammar(schema, field, whitespace_pattern=whitespace_pattern)


def _unquoted(raw: Raw, field: str) -> Any:
    """vLLM's clients may send JSON as a string."""
    value = decode_field(raw, field, Any)
    return decode_field(value.encode(), field, Any) if isinstance(value, str) else value


def _of_grammar(text: str, field: str) -> str:
    try:
        return lark_grammar(lark_from_gbnf(text) if is_gbnf(text) else with_narrow_schemas(text, field))
    except ValueError as error:
        raise InvalidRequestError(field, str(error)) from error


class Structure(msgspec.Struct):
    """A part of the text between `begin` and `end`, by a schema; the rest is free."""

    begin: str
    schema: Raw
    end: str = ""


class StructuralTag(msgspec.Struct):
    """vLLM's: text is free up to a trigger, which begins one of the structures."""

    structures: list[Structure]
    triggers: list[str]


def _of_tags(raw: bytes, field: str, special_tokens: Collection[str]) -> str:
    _check_size(len(raw), field)
    value = decode_field(raw, field, Any)
    if isinstance(value, str):
        raw = value.encode()
    wanted: StructuralTag | None = decode_field(raw, field, StructuralTag)
    if wanted is None or not wanted.structures:
        raise InvalidRequestError(f"{field}.structures", "at least one is required")
    tags = []
    for number, each in enumerate(wanted.structures):
        trigger = next((t for t in wanted.triggers if t and each.begin.startswith(t)), None)
        if trigger is None:
            reason = f"must start with one of the triggers, got {each.begin!r}"
            raise InvalidRequestError(f"{field}.structures[{number}].begin", reason)
        schema = _unquoted(each.schema, f"{field}.structures[{number}].schema")
        if not isinstance(schema, dict):
            raise InvalidRequestError(f"{field}.structures[{number}].schema", "must be an object")
        tags.append(StructTag(trigger=trigger, begin=each.begin, grammar=schema, end=each.end))
    is_special = any(tag.trigger in special_tokens for tag in tags)
    try:
        return lark_grammar(StructTag.to_grammar(tags, assume_special=is_special))
    except RecursionError as error:
        raise InvalidRequestError(field, str(error)) from error
