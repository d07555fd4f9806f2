"""Grammars of arguments in Python's and Gemma's notation enforce schemas, and parsers read their texts."""

from __future__ import annotations

import json
from typing import Any

import pytest
from llguidance import LLMatcher

from protocol.errors import InvalidRequestError
from router.grammars.tool_grammar import OfferedFunction, tool_grammar
from router.parsing import formats
from router.parsing.formats import Parsing
from router.parsing.parameters import Parameters
from tests.router.grammars.test_tool_grammar import Model, model_of
from tests.router.parsing.test_parsing import block, parsed

FORMS = {"pythonic": formats.PYTHONIC, "gemma4": formats.GEMMA4}


@pytest.fixture(scope="module", params=[True, False], ids=["tokens", "texts"])
def model(request):
    return model_of(request.param)


def call(kind: str, arguments: dict[str, Any]) -> str:
    return block(FORMS[kind], ("f", json.dumps(arguments)))


def grammar(model: Model, kind: str, schema: dict[str, Any] | None, strict: bool = True) -> str:
    return tool_grammar(
        FORMS[kind], [OfferedFunction("f", schema, strict)], model.spelling, demanded=True, several=False
    )


def closed(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "additionalProperties": False}


TREE: dict[str, Any] = {
    "properties": {"n": {"type": "integer"}, "next": {"anyOf": [{"$ref": "#/$defs/T"}, {"type": "null"}]}}
}
TREE |= {"required": ["n"], "additionalProperties": False}
KINDS = {
    "s": {"type": "string"},
    "i": {"type": "integer"},
    "b": {"type": "boolean"},
    "n": {"type": ["number", "null"]},
}
CONSTANTS = ["x y", 'q"', 3, None, True, [1, "z"], {"k": "v"}]
TEXTS = {"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": 2}
LIMITS = {"a": {"type": "string", "minLength": 2, "maxLength": 3}, "b": {"type": "integer", "minimum": 5}}
LIMITS |= {"c": {"type": ["integer", "null"], "maximum": 5}}
SCHEMAS: dict[str, tuple[dict[str, Any] | None, list[Any], list[Any]]] = {
    "none": (None, [{}], [{"a": 1}]),
    "all kinds": (
        {**closed(**KINDS), "required": ["s", "b"]},
        [
            {"s": 'é 🙂 {"[(', "b": True},
            {"s": "", "i": -3, "b": False, "n": None},
            {"s": "a", "b": True, "n": 2.5},
        ],
        [{"s": "a"}, {"s": "a", "b": None}, {"b": True, "s": "a"}, {"s": 1, "b": True}],
    ),
    "anything": ({}, [{}, {"a": [1, {"b": None, "c": ["x", True]}], "d": {}}], []),
    "others of a type": (
        {"properties": {"a": {"type": "string"}}, "additionalProperties": {"type": "integer"}},
        [{"a": "x", "b": 1, "c": 2}, {"b": 1}],
        [{"a": 1}, {"b": "x"}, {"b": 1, "a": 1}],
    ),
    "constants": (
        closed(a={"enum": CONSTANTS}, c={"const": ""}),
        [*({"a": value} for value in CONSTANTS), {"c": ""}],
        [{"a": "x"}, {"a": 4}, {"a": False}, {"a": [1]}, {"c": "d"}],
    ),
    "lists": (
        closed(a=TEXTS, b={"items": {"enum": [1]}}, c={"items": {}, "maxItems": 1}),
        [{"a": ["x"]}, {"a": ["x", "y"]}, {"b": []}, {"b": [1, 1, 1]}, {"c": [1]}],
        [{"a": []}, {"a": ["x", "y", "z"]}, {"a": [1]}, {"b": [2]}, {"c": [1, 2]}],
    ),
    "lengths and bounds": (
        closed(**LIMITS),
        [{"a": "é🙂"}, {"a": "abc", "b": 5}, {"c": 5}, {"c": None}],
        [{"a": "a"}, {"a": "abcd"}, {"b": 4}, {"c": 6}],
    ),
    "references": (
        {**closed(t={"$ref": "#/$defs/T"}), "$defs": {"T": TREE}},
        [{"t": {"n": 1}}, {"t": {"n": 1, "next": {"n": 2, "next": None}}}],
        [{"t": {"next": None}}, {"t": {"n": 1, "next": {}}}],
    ),
    "nested": (
        closed(o={**closed(a={"type": "boolean"}, b={"type": "string"}), "required": ["b"]}),
        [{"o": {"b": "x"}}, {"o": {"a": True, "b": "x"}}],
        [{"o": {}}, {"o": {"b": "x", "a": True}}, {"o": {"b": "x", "c": 1}}],
    ),
}


@pytest.mark.parametrize("kind", FORMS)
@pytest.mark.parametrize(("schema", "good", "bad"), SCHEMAS.values(), ids=SCHEMAS)
def test_a_schema_is_enforced_and_its_texts_are_parsed(model, kind, schema, good, bad):
    made = grammar(model, kind, schema)
    parsing = Parsing(tools=kind, known={"f": Parameters()})
    for arguments in good:
        text = call(kind, arguments)
        assert model.takes(made, text), text
        _, content, ((_, found),) = parsed(parsing, list(text))
        assert content == "" and json.loads(found) == arguments and list(json.loads(found)) == list(arguments)
    for arguments in bad:
        assert not model.takes(made, call(kind, arguments)), arguments


CANNOT = {
    "uniqueItems": closed(a={"type": "array", "uniqueItems": True}),
    "allOf": closed(a={"allOf": [{}]}),
    "patternProperties": {"patternProperties": {"a": {}}},
    "unevaluatedProperties": {"properties": {}, "unevaluatedProperties": False},
    "a(b": closed(**{"a(b": {}}),
}


@pytest.mark.parametrize("kind", FORMS)
@pytest.mark.parametrize("keyword", CANNOT)
def test_unsupported_keywords_are_named_and_only_matter_to_strict_functions(kind, keyword):
    model = model_of(True)
    with pytest.raises(InvalidRequestError, match="tools: f: ") as refused:
        grammar(model, kind, CANNOT[keyword])
    assert refused.value.field == "tools" and keyword in refused.value.message
    assert model.takes(grammar(model, kind, CANNOT[keyword], strict=False), call(kind, {}))


@pytest.mark.parametrize("kind", FORMS)
@pytest.mark.parametrize(
    "schema",
    [
        {"properties": ["a"]},
        closed(a={"$ref": "#/$defs/none"}),
        closed(a={"type": "text"}),
        closed(a=False),
        closed(a={"type": "array", "minItems": 2, "maxItems": 1}),
        closed(a={"type": "string", "enum": [1]}),
    ],
)
def test_invalid_schemas_are_refused(kind, schema):
    model = model_of(True)
    with pytest.raises(InvalidRequestError, match="tools: f: "):
        grammar(model, kind, {**schema, "required": ["a"]})


def test_string_patterns_work_in_python_and_are_refused_in_gemmas_notation(model):
    schema = closed(a={"type": "string", "pattern": "^[a-c]+$"}, d={"type": "string", "format": "date"})
    made = grammar(model, "pythonic", schema)
    assert model.takes(made, '[f(a="abc", d="2024-02-29")]')
    assert not model.takes(made, '[f(a="d")]') and not model.takes(made, '[f(d="2023-02-29")]')
    with pytest.raises(InvalidRequestError, match=r"properties\.a\.pattern"):
        grammar(model, "gemma4", schema)


def test_a_mark_within_a_string_ends_the_string(model):
    made = grammar(model, "gemma4", closed(a={"type": "string", "minLength": 6}))
    assert not model.takes(made, '<|tool_call>call:f{a:<|"|>a<|"|>b<|"|>}<tool_call|>')
    assert model.takes(made, '<|tool_call>call:f{a:<|"|><|"|a><|"|>}<tool_call|>')


def test_grammars_compile():
    """Grammars with a hundred optional parameters."""
    model = model_of(True)
    schema = {"properties": {f"p{number}": {"type": "string"} for number in range(100)}}
    for kind in FORMS:
        assert not LLMatcher(model.ll, grammar(model, kind, schema), log_level=0).is_error()
