"""The constraints on an answer as data, and their conversion to one llguidance grammar.

The conversion runs only in the preprocessor, since it may take any time.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec
from llguidance import LLMatcher
from msgspec import Raw

from protocol.errors import InvalidRequestError
from router.decoding import decode_field
from router.grammars.json_schemas import ends_in_escape, schema_grammar
from router.grammars.lark import (
    TEXT,
    Spelling,
    is_gbnf,
    lark_from_gbnf,
    lark_grammar,
    named,
    quoted,
    with_narrow_schemas,
)
from router.openai_types import MAX_RAW_BYTES, GenerationBody, ResponseFormat, StructuredOutputs, Tool


class Calls(msgspec.Struct, frozen=True):
    """The constraint of calls to `tools`, or to the tool `name`, and of arguments to their schemas."""

    tools: list[Tool]
    must_call: bool
    several: bool
    name: str | None = None


class AskedGrammar(msgspec.Struct, frozen=True):
    """A `GrammarRequest` as JSON, and the field of the client's request that it came from."""

    field: str
    request: bytes


class GrammarRequest(msgspec.Struct, frozen=True):
    """The constraints on one answer. `is_open`: the prompt has begun the thinking; None: no thinking."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    calls: Calls | None = None
    is_open: bool | None = None

    @property
    def field(self) -> str:
        """The client's field that asks for the grammar."""
        if self.structured_outputs is not None:
            return "structured_outputs"
        return "tools" if self.response_format is None else "response_format"

    def asked(self) -> AskedGrammar:
        return AskedGrammar(self.field, msgspec.json.encode(_without_absent(self)))


def grammar_request(
    body: GenerationBody, calls: Calls | None = None, is_open: bool | None = None
) -> GrammarRequest | None:
    """Return the constraints on the answer; None if any text is allowed."""
    wanted = body.response_format
    if wanted is not None and wanted.type == "text":
        wanted = None
    if wanted is None and body.structured_outputs is None and calls is None:
        return None
    return GrammarRequest(wanted, body.structured_outputs, calls, is_open)


def asked_grammar(
    body: GenerationBody, calls: Calls | None = None, is_open: bool | None = None
) -> AskedGrammar | None:
    request = grammar_request(body, calls, is_open)
    return None if request is None else request.asked()


def _without_absent(value: Any) -> Any:
    """Drop absent fields: an empty `Raw` is not JSON."""
    if isinstance(value, list):
        return [_without_absent(each) for each in value]
    if not isinstance(value, msgspec.Struct):
        return value
    fields = {name: getattr(value, name) for name in value.__struct_fields__}
    return {name: _without_absent(each) for name, each in fields.items() if each not in (None, Raw())}


_ANY_OBJECT = Raw(b'{"type":"object"}')
_KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")


class Grammar(NamedTuple):
    """A grammar and the field of the request that asks for it."""

    text: str
    field: str


def requested_grammar(request: GrammarRequest, tokens: Mapping[str, int]) -> Grammar | None:
    """Return the grammar that the request asks for, if any. `tokens`: special tokens' ids by text.

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
    present = [name for name in _KINDS if _is_present(getattr(wanted, name))]
    if len(present) != 1:
        found = " and ".join(present) or "none"
        raise InvalidRequestError("structured_outputs", f"one of {', '.join(_KINDS)}, got {found}")
    (kind,) = present
    field = f"structured_outputs.{kind}"
    size = sum(map(len, wanted.choice or ())) + len((wanted.grammar or wanted.regex or "").encode())
    check_size(size, field)
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


def _is_present(value: Any) -> bool:
    return bytes(value) not in (b"", b"null") if isinstance(value, Raw) else bool(value)


def _from_schema(raw: Raw, field: str, whitespace_pattern: str | None = None) -> str:
    check_size(len(bytes(raw)), field)
    return schema_grammar(decoded_schema(raw, field), field, whitespace_pattern=whitespace_pattern)


def _from_grammar(text: str, field: str) -> str:
    try:
        return lark_grammar(lark_from_gbnf(text) if is_gbnf(text) else with_narrow_schemas(text, field))
    except ValueError as error:
        raise InvalidRequestError(field, str(error)) from error


class Structure(msgspec.Struct):
    """A part of the text that begins with `begin`, satisfies `schema` and ends with `end`."""

    begin: str
    schema: Raw
    end: str = ""


class StructuralTag(msgspec.Struct):
    """Free text until a trigger, which begins one of the structures."""

    structures: list[Structure]
    triggers: list[str]


def tag_grammar(raw: bytes, field: str, tokens: Mapping[str, int]) -> str:
    """Return the grammar of a structural tag. `tokens`: special tokens' ids by text."""
    check_size(len(raw), field)
    value = decode_field(raw, field, Any)
    if isinstance(value, str):
        raw = value.encode()
    wanted: StructuralTag | None = decode_field(raw, field, StructuralTag)
    if wanted is None or not wanted.structures:
        raise InvalidRequestError(f"{field}.structures", "at least one is required")
    texts = [text for each in wanted.structures for text in (each.begin, each.end)]
    spelling = Spelling([token for token in tokens if any(token in text for text in texts)], tokens.get)
    rules, schemas = [], []
    for number, each in enumerate(wanted.structures):
        at = f"{field}.structures[{number}]"
        trigger = next((t for t in wanted.triggers if t and each.begin.startswith(t)), None)
        if trigger is None:
            reason = f"must start with one of the triggers, got {each.begin!r}"
            raise InvalidRequestError(f"{at}.begin", reason)
        schema = decoded_schema(each.schema, f"{at}.schema")
        schemas += named(f"schema{number}", schema_grammar(schema, f"{at}.schema"))
        begin, end = spelling(each.begin.removeprefix(trigger)), spelling(each.end)
        rules += [
            spelling.rule_up_to(f"head{number}", [trigger]),
            f"tag{number}: head{number} {begin} @schema{number} {end}",
        ]
    tags = " | ".join(f"tag{number}" for number in range(len(schemas)))
    return lark_grammar(f"start: ({tags})* TEXT", TEXT, *rules, others=schemas)


def decoded_schema(raw: Raw, field: str) -> dict[str, Any]:
    """Decode a JSON schema. vLLM's clients may send the schema as a string."""
    schema = decode_field(raw, field, Any)
    if isinstance(schema, str):
        schema = decode_field(schema.encode(), field, Any)
    if not isinstance(schema, dict):
        raise InvalidRequestError(field, f"must be a JSON schema, got {type(schema).__name__}")
    return schema


def check_size(size: int, field: str) -> None:
    if size > MAX_RAW_BYTES:
        raise InvalidRequestError(field, f"at most {MAX_RAW_BYTES} bytes, got {size}")
