"""Grammars of JSON schemas accept exactly what the schemas allow, or a keyword is refused by name."""

from __future__ import annotations

import json
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from protocol.errors import InvalidRequestError
from router.grammars.json_schemas import schema_grammar
from tests.router.grammars.test_structured_outputs import grammar_of

BYTES = LLTokenizer("byte")
FAR = 2**63
"""The smallest number beyond 64 signed bits."""


def matcher(schema: dict[str, Any], **options: Any) -> LLMatcher:
    found = LLMatcher(BYTES, schema_grammar(schema, "f", **options), log_level=0)
    assert not found.is_error(), found.get_error()
    return found


def takes(start: LLMatcher, text: str) -> bool:
    at, tokens = start.deep_copy(), list(text.encode())
    return at.try_consume_tokens(tokens) == len(tokens) and at.is_accepting()


def in_words(*values: Any) -> list[str]:
    return [json.dumps(value, ensure_ascii=False) for value in values]


def same(schema: dict[str, Any], right: list[str], wrong: list[str]) -> None:
    start = matcher(schema)
    assert [text for text in right if not takes(start, text)] == []
    assert [text for text in wrong if takes(start, text)] == []


def integer(**keywords: Any) -> dict[str, Any]:
    return {"type": "integer", **keywords}


def text(**keywords: Any) -> dict[str, Any]:
    return {"type": "string", **keywords}


def some(**keywords: Any) -> dict[str, Any]:
    """Return a schema of objects with these keywords."""
    return {"type": "object", **keywords}


INT64 = integer(minimum=-FAR, maximum=FAR - 1)
ONE = {"const": 1}
NEAR = ["0", "-1", str(2**53 + 1), str(2**62), str(-(2**62))]
NUMBERS: dict[str, tuple[dict[str, Any], list[str], list[str]]] = {
    "64 bits": (INT64, NEAR, [str(FAR), str(-FAR - 1), "1.5"]),
    "64 bits, one bound": (integer(minimum=-FAR), [*NEAR, str(FAR)], [str(-FAR - 1)]),
    "unsigned": (integer(minimum=0, maximum=2**64 - 1), ["0", str(2**62)], [str(2**64), "-1"]),
    "a double's integers": (
        integer(minimum=1 - 2**53, maximum=2**53 - 1),
        [str(2**53 - 1), str(1 - 2**53)],
        [str(2**53), str(-(2**53))],
    ),
    "wide": ({"type": "number", "maximum": 1e30}, [*NEAR, "0.5"], [f"1{'0' * 31}"]),
    "wide, no type": ({"minimum": -1e30, "maximum": 1e30}, [*NEAR, "0.5"], [f"-1{'0' * 31}"]),
    "exclusive": (integer(exclusiveMinimum=2**53), [str(2**54)], [str(2**53), str(2**53 - 1)]),
    "exclusive, as draft 4 has it": (
        integer(maximum=-(2**53), exclusiveMaximum=True),
        [str(-(2**54))],
        [str(-(2**53)), "0"],
    ),
    "between doubles": (integer(minimum=2**60 + 1), [str(2**61)], [str(2**60)]),
    "19 digits": (integer(minimum=10**18), [str(2 * 10**18)], [str(10**18 - 1), "0"]),
    "a small bound": ({"type": "number", "minimum": 5e-324}, ["0.1", "1"], ["0", "-1"]),
    "multiples": ({"allOf": [integer(multipleOf=6), {"multipleOf": 4}]}, ["12", "0", "-24"], ["6", "4"]),
    "a decimal multiple": ({"type": "number", "multipleOf": 0.01}, ["0.01", "-3.2", "7"], ["0.001"]),
    "the largest": ({"const": FAR - 1}, [str(FAR - 1)], [str(FAR), str(FAR - 2)]),
    "an exact double": ({"enum": [2**53 + 2, [-(2**62)]]}, [str(2**53 + 2)], [str(2**53), str(2**53 + 1)]),
    "fractions": ({"enum": [0.1 + 0.2, 1 / 3]}, in_words(0.1 + 0.2, 1 / 3), ["0.3", "0.333333333333333"]),
    "a fraction that is rounded twice": (
        {"type": "number", "minimum": 123456789.12345679},
        ["123456789.1234569", "123456790"],
        ["123456789.12345678", "123456789"],
    ),
}


@pytest.mark.parametrize("key", ["minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum"])
@pytest.mark.parametrize("kind", ["integer", "number"])
@pytest.mark.parametrize("bound", [2**53, 2**53 + 1, 2**60 - 1, 10**18, 2**63 - 40_000])
def test_no_number_past_a_bound(key: str, kind: str, bound: int) -> None:
    """Rounding may only exclude numbers within the bound."""
    sign = 1 if "inimum" in key else -1
    for value in (bound, -bound):
        start = matcher({"type": kind, key: value})
        assert takes(start, str(value + sign * 30_000))
        near = [value - sign * step for step in (1, 2, 500, 1024, 10_000, 20_000)]
        assert not any(takes(start, str(number)) for number in near)
        assert "xclusive" not in key or not takes(start, str(value))


DATES = ["2020-02-29", "2000-02-29", "2021-02-28", "1999-12-31", "0001-01-01"]
NO_DATES = ["2021-02-29", "1900-02-29", "2100-02-29", "2021-02-30", "2021-04-31", "2021-00-10", "0000-01-01"]
TIMES = ["00:00:00Z", "23:59:59.25+05:30", "12:30:00z"]
NO_TIMES = ["12:00:60Z", "24:00:00Z", "12:00:00", "12:60:00Z"]
FORMATS: dict[str, tuple[dict[str, Any], list[str], list[str]]] = {
    "date": (text(format="date"), in_words(*DATES), in_words(*NO_DATES, "x", "2021-1-1")),
    "time": (text(format="time"), in_words(*TIMES), in_words(*NO_TIMES)),
    "date-time": (
        {"format": "date-time", "type": ["string", "null"]},
        in_words(None, *(f"{day}T{TIMES[0]}" for day in DATES), *(f"{DATES[0]}t{time}" for time in TIMES)),
        in_words(*(f"{day}T{TIMES[0]}" for day in NO_DATES), *(f"{DATES[0]}T{time}" for time in NO_TIMES)),
    ),
    "beside a pattern": (
        text(format="date", pattern="-29$", minLength=10),
        in_words("2020-02-29", "2021-01-29"),
        in_words("2021-02-29", "2020-02-28"),
    ),
    "of a number": (integer(format="int64"), ["5"], ['"5"']),
    "a property's name": (
        some(properties={"format": {"const": "date"}}, additionalProperties=False),
        ['{"format": "date"}'],
        ['{"format": "2020-02-29"}'],
    ),
}


A = some(properties={"a": ONE, "ᄑ": ONE}, required=["a"])
NAMES: dict[str, tuple[dict[str, Any], list[str], list[str]]] = {
    "further ones": (
        {**A, "additionalProperties": {"const": 2}},
        ['{"a": 1, "b": 2}', '{"a": 1, "ᄑ": 1, "\\n": 2, "\\\\u0061": 2}'],
        ['{"a": 1, "a": 2}', '{"a": 1, "\\u0061": 2}', '{"a": 1, "\\u1111": 2}'],
    ),
    "any": (A, ['{"a": 1, "b": []}'], ['{"a": 1, "\\u0061": []}']),
    "of a pattern": (
        some(patternProperties={"^b": {"const": 3}}, additionalProperties={"const": 2}),
        ['{"b": 3}', '{"a": 2}'],
        ['{"b": 2}', '{"\\u0062": 2}'],
    ),
    "a control character": (
        some(required=["\x1b"], additionalProperties={"const": 2}),
        ['{"\\u001b": 2}'],
        ['{"\\u001b": 2, "\\u001B": 2}'],
    ),
    "none further": (
        {**A, "properties": {"a": {"type": "string"}}, "additionalProperties": False},
        ['{"a": "\\u001b[31m"}'],
        ['{"a": "", "\\u0061": ""}'],
    ),
    "in parts": (
        {"allOf": [A, {"additionalProperties": {"type": "integer"}}]},
        ['{"a": 1, "b": 5}'],
        ['{"a": 1, "\\u0061": 2}'],
    ),
    "at least one": (
        some(patternProperties={"^[xy]$": ONE}, additionalProperties=False, minProperties=1),
        ['{"x": 1}'],
        ["{}"],
    ),
    "one more than is required": (
        some(properties={"a": ONE}, required=["a"], minProperties=2),
        ['{"a": 1, "b": 2}'],
        ['{"a": 1}', '{"a": 1, "a": 1}', '{"a": 1, "\\u0061": 1}'],
    ),
}


CASES = NUMBERS | FORMATS | NAMES


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_exactly_the_values_of_a_schema(case: tuple[dict[str, Any], list[str], list[str]]) -> None:
    same(*case)


PATTERNS = {
    "[a&&b]": ("a&b", "c"),
    "[a~~b]": ("a~b", "c"),
    "[+--]": ("+,-", "*."),
    "[--/]": ("-./", ",0"),
    "[a-]": ("a-", "b"),
    "[-a]": ("a-", "b"),
    r"[\w-.]": ("a-.", "/ "),
    r"[\d-x]": ("1-x", "a"),
    "[a-c-e]": ("ab-e", "d"),
    "[^[\\]]": ("a", "[]"),
    "[[]": ("[", "]a"),
    "[!-/:-@[-`{-~]": ("!/:@[`{~\\^", "aZ0"),
    "[\\]^]": ("]^", "a"),
    "[\\u00e9-\\u00ff]": ("éÿ", "e"),
    "[\\/.]": ("/.", "\\"),
    "[^]": ("a\n", ""),
}


@pytest.mark.parametrize("pattern", PATTERNS)
def test_classes_of_a_pattern(pattern: str) -> None:
    right, wrong = (in_words(*texts) for texts in PATTERNS[pattern])
    same(text(pattern=f"^{pattern}$"), right, wrong)
    names = some(patternProperties={f"^{pattern}$": ONE}, additionalProperties=False)
    same(names, [f"{{{text}: 1}}" for text in right], [f"{{{text}: 1}}" for text in wrong])


def within(name: str, **schema: Any) -> dict[str, Any]:
    return some(properties={name: schema})


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    **{
        f"const {n}": ({"const": n}, "const")
        for n in (123456789.12345679, 2**53 + 1, FAR, 2**64 - 1, 10**22 + 1, -FAR, -FAR - 1, 1e30)
    },
    "enum": (within("id", enum=["x", {"a": [2**53 + 1]}]), "properties.id.enum"),
    "anyOf": ({"anyOf": [{"type": "string"}, {"const": 2**53 + 1}]}, "anyOf.1.const"),
    "$defs": ({"$ref": "#/$defs/a", "$defs": {"a": {"const": 2**53 + 1}}}, "$defs.a.const"),
    "components": (
        {"$ref": "#/components/schemas/a", "components": {"schemas": {"a": {"const": 2**53 + 1}}}},
        "components.schemas.a.const",
    ),
    "items": ({"type": "array", "items": [{"minimum": FAR}]}, "items.0.minimum"),
    "minimum": (integer(minimum=FAR), "minimum"),
    "exclusiveMaximum": ({"type": "number", "exclusiveMaximum": -1e30}, "exclusiveMaximum"),
    **{f"multiple {n}": ({"multipleOf": n}, "multipleOf") for n in (0, 0.07, 500_000_000, 2**32, 1e300)},
    "pattern": (within("a", pattern="^a\\"), "properties.a.pattern"),
    "two multiples": ({"allOf": [{"multipleOf": 65536}, {"multipleOf": 65537}]}, "allOf.0.multipleOf"),
    "minProperties": (some(minProperties=2), "minProperties"),
    "minProperties of patterns": (
        some(patternProperties={"^[xy]$": {}}, additionalProperties=False, minProperties=2),
        "minProperties",
    ),
    "a control character": (within("a", const="\x1b"), "properties.a.const"),
}


@pytest.mark.parametrize("case", REFUSED.values(), ids=REFUSED)
def test_refused_keywords_are_named(case: tuple[dict[str, Any], str]) -> None:
    schema, named = case
    with pytest.raises(InvalidRequestError, match=f"^f: {named.replace('$', '[$]')}: "):
        schema_grammar(schema, "f")
    matcher(schema, lenient=True)


BIG = {"const": 2**53 + 1}
BIG_TAG = {"structures": [{"begin": "<f>", "schema": BIG}], "triggers": ["<f>"]}


@pytest.mark.parametrize(
    "fields",
    [
        *(
            {"structured_outputs": {kind: value}}
            for kind, value in (
                ("json", BIG),
                ("json", json.dumps(BIG)),
                ("structural_tag", BIG_TAG),
                ("grammar", f'start: "a" x\nx: %json {json.dumps(BIG)} | "b"'),
            )
        ),
        {"response_format": {"type": "structural_tag", **BIG_TAG}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": BIG}}},
    ],
)
def test_schemas_are_accepted_in_all_places(fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError, match="const: 9007199254740993 has too many digits"):
        grammar_of(fields)


def test_references() -> None:
    """An anchor's name does not refer to the whole schema, so it is no self-reference."""
    number = {"$anchor": "number", "type": "integer"}
    named = schema_grammar({"$ref": "#number", "$defs": {"A": number}}, "f")
    assert takes(LLMatcher(BYTES, named, log_level=0), "7")
    for schema in (
        {"$ref": "#"},
        {"allOf": [{"$ref": "#"}]},
        {"properties": {"a": {"$ref": "#/properties/a"}}},
    ):
        with pytest.raises(InvalidRequestError, match="leads back to itself"):
            schema_grammar(schema, "f")


def test_schemas_in_lark() -> None:
    """Text that looks like a schema in a literal, an expression or a comment is left alone."""
    grammar = """
        start: "%json {" | /%json "/ date  // %json {"const": 1e30}
        date: %json {"format": "date", "x-guidance": {"whitespace_flexible": false}} "/" any  # "%json
        any: %json true"""
    made = grammar_of({"structured_outputs": {"grammar": grammar}})
    assert made is not None
    start = LLMatcher(BYTES, made.text, log_level=0)
    assert not start.is_error(), start.get_error()
    assert takes(start, "%json {") and takes(start, '%json ""2020-02-29"/[1]')
    assert not takes(start, '%json ""2021-02-29"/[1]')
