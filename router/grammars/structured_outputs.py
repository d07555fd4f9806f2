"""Converts `response_format` and `structured_outputs` to one grammar in llguidance's notation.

This runs only in the preprocessor, since it may take any time.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec
from llguidance import LLMatcher
from msgspec import Raw

from protocol.errors import InvalidRequestError
from router.grammars.gbnf import is_gbnf, lark_from_gbnf
from router.grammars.grammar_request import GrammarRequest
from router.grammars.json_schemas import schema_grammar
from router.grammars.lark import lark_grammar, quoted, with_narrow_schemas
from router.grammars.regexes import ends_in_escape
from router.grammars.structural_tags import check_size, decoded_schema, tag_grammar
from router.openai_types import ResponseFormat, StructuredOutputs

_ANY_OBJECT = Raw(b'{"type":"object"}')
_KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")


class Grammar(NamedTuple):
    """A grammar and the request's field that asks for it."""

    text: str
    field: str


def requested_grammar(request: GrammarRequest, tokens: Mapping[str, int]) -> Grammar | None:
    """Return the grammar that the request asks for, if any. `tokens` are the special tokens' ids by text.

    Raises `InvalidRequestError`. The compiler checks whether the grammar is valid.
    """
    formatted = _from_response_format(request.response_format, tokens)
    structured = _from_structured_outputs(request.structured_outputs, tokens)
    if formatted is not None and structured is not None:
        raise InvalidRequestError("structured_outputs", "not together with response_format")
    return formatted or structured


def _from_response_format(wanted: ResponseFormat | None, tokens: Mapping[str, int]) -> Grammar | None:
    if wanted is None or wanted.type == "text":
        return None
    field = "response_format"
    if wanted.type == "json_object":
        return Grammar(_from_schema(_ANY_OBJECT, field), field)
    if wanted.type == "structural_tag":
        tags = msgspec.json.encode({"structures": wanted.structures, "triggers": wanted.triggers})
        return Grammar(tag_grammar(tags, field, tokens), field)
    if wanted.type != "json_schema":
        kinds = "text, json_object, json_schema or structural_tag"
        raise InvalidRequestError("response_format.type", f"must be {kinds}, got {wanted.type!r}")
    field = "response_format.json_schema"
    if wanted.json_schema is None:
        raise InvalidRequestError(field, "is required with the type json_schema")
    field += ".schema"
    return Grammar(_from_schema(wanted.json_schema.schema, field), field)


def _from_structured_outputs(wanted: StructuredOutputs | None, tokens: Mapping[str, int]) -> Grammar | None:
    if wanted is None:
        return None
    given = [name for name in _KINDS if _is_given(getattr(wanted, name))]
    if len(given) != 1:
        found = " and ".join(given) or "none"
        raise InvalidRequestError("structured_outputs", f"one of {', '.join(_KINDS)}, got {found}")
    (kind,) = given
    field = f"structured_outputs.{kind}"
    check_size(
        sum(map(len, wanted.choice or ())) + len((wanted.grammar or wanted.regex or "").encode()), field
    )
    match kind:
        case "json":
            text = _from_schema(wanted.json, field, wanted.whitespace_pattern)
        case "json_object":
            text = _from_schema(_ANY_OBJECT, field, wanted.whitespace_pattern)
        case "regex":
            regex = wanted.regex or ""
            if ends_in_escape(regex):
                raise InvalidRequestError(field, "ends within an escape")
            text = LLMatcher.grammar_from_regex(regex)
        case "choice":
            text = lark_grammar("start: " + " | ".join(map(quoted, wanted.choice or ())))
        case "grammar":
            text = _from_grammar(wanted.grammar or "", field)
        case _:
            text = tag_grammar(bytes(wanted.structural_tag), field, tokens)
    return Grammar(text, field)


def _is_given(value: Any) -> bool:
    return bytes(value) not in (b"", b"null") if isinstance(value, Raw) else bool(value)


def _from_schema(raw: Raw, field: str, whitespace_pattern: str | None = None) -> str:
    check_size(len(bytes(raw)), field)
    return schema_grammar(decoded_schema(raw, field), field, whitespace_pattern=whitespace_pattern)


def _from_grammar(text: str, field: str) -> str:
    try:
        return lark_grammar(lark_from_gbnf(text) if is_gbnf(text) else with_narrow_schemas(text, field))
    except ValueError as error:
        raise InvalidRequestError(field, str(error)) from error
