"""vLLM's structural tags: free text with parts in it that satisfy JSON schemas."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec import Raw

from protocol.errors import InvalidRequestError
from router.decoding import decode_field
from router.grammars.json_schemas import schema_grammar
from router.grammars.lark import TEXT, Spelling, lark_grammar, named
from router.openai_types import MAX_RAW_BYTES


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
    """Return the grammar of a structural tag. `tokens` are the special tokens' ids by text. Raises
    `InvalidRequestError`.
    """
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
    """Decode a JSON schema. vLLM's clients may send it as a string."""
    schema = decode_field(raw, field, Any)
    if isinstance(schema, str):
        schema = decode_field(schema.encode(), field, Any)
    if not isinstance(schema, dict):
        raise InvalidRequestError(field, f"must be a JSON schema, got {type(schema).__name__}")
    return schema


def check_size(size: int, field: str) -> None:
    if size > MAX_RAW_BYTES:
        raise InvalidRequestError(field, f"at most {MAX_RAW_BYTES} bytes, got {size}")
