"""Structured outputs: each option's grammar has exactly its texts, in llama.cpp's notation, too."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from protocol.config import ServeConfig
from protocol.errors import InvalidRequestError
from router.decoding import decode_body
from router.grammars.structured_outputs import Grammar, GrammarRequest, grammar_request, requested_grammar
from router.openai_types import CompletionBody
from router.preprocessing.client import GrammarCompiler, Preprocessor
from router.text.tokenizer import Tokenizer
from tests.router.router_clients import eventually

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
TAG = {"structures": [{"begin": "<call=f>", "schema": PERSON, "end": "</call>"}], "triggers": ["<call"]}
TAGS = {
    "structures": [
        {"begin": '<call=f\x7f"🙂">', "schema": PERSON, "end": "\\</call>"},
        {"begin": "<call=g>", "schema": json.dumps({"type": "integer"})},
    ],
    "triggers": ["<call="],
}
BOB = '{"name": "Bob", "age": 3}'
COMPACT = '{"name":"Bob","age":3}'


def structured(**fields: Any) -> dict[str, Any]:
    return {"structured_outputs": fields}


def formatted(kind: str, **fields: Any) -> dict[str, Any]:
    return {"response_format": {"type": kind, **fields}}


CASES: dict[str, tuple[dict[str, Any], list[str], list[str]]] = {
    "json": (structured(json=PERSON), [BOB], ["{}", COMPACT, BOB[:-1], '{"name": 3, "age": 3}']),
    "json in a string": (structured(json=json.dumps(PERSON)), [BOB], ["{}"]),
    "spaces of its own": (structured(json=PERSON, whitespace_pattern=" ?"), [COMPACT, BOB], ['{  "name"']),
    "regex": (structured(regex="[a-c]+x"), ["abcx", "ax"], ["x", "abx ", "dx"]),
    "choice": (structured(choice=["ja", 'n"ö\n', "ja!"]), ["ja", 'n"ö\n', "ja!"], ["nein", "j"]),
    "Lark": (structured(grammar='start: "a" /[0-9]+/'), ["a12"], ["a"]),
    "GBNF": (structured(grammar='root ::= "a" [0-9]+'), ["a12"], ["a"]),
    "any object": (structured(json_object=True), ["{}", '{"a": [1, null]}'], ["[]", "1"]),
    "a tag": (
        structured(structural_tag=TAG),
        ["free text", f"I <call=f>{BOB}</call> and <call=f>{BOB}</call>"],
        ["<call=g>", "<call=f>{}</call>"],
    ),
    "two tags of a trigger": (
        structured(structural_tag=TAGS),
        [f'see <call=f\x7f"🙂">{BOB}\\</call>, <call=g>5', "<cal"],
        [f"<call=f>{BOB}", "<call=g>x", f'<call=f\x7f"🙂">{COMPACT}\\</call>', "<call=g> 5"],
    ),
    "json_object": (formatted("json_object"), ["{}"], ["[]"]),
    "json_schema": (
        formatted("json_schema", json_schema={"name": "p", "strict": True, "schema": PERSON}),
        [BOB],
        ["{}"],
    ),
    "structural_tag": (formatted("structural_tag", **TAG), [f"<call=f>{BOB}</call>"], ["<call=f>{}</call>"]),
}


@pytest.fixture(scope="module")
def tokenizer(model_folder: Path) -> Tokenizer:
    return Tokenizer.load(ServeConfig(model=str(model_folder)))


def grammar_of(fields: dict[str, Any]) -> Grammar | None:
    asked = request_of(fields)
    return None if asked is None else requested_grammar(asked, {})


def request_of(fields: dict[str, Any]) -> GrammarRequest | None:
    raw = json.dumps({"prompt": "x", **fields}).encode()
    return grammar_request(decode_body(raw, CompletionBody))


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_grammar_has_exactly_the_texts(
    tokenizer: Tokenizer, case: tuple[dict[str, Any], list[str], list[str]]
) -> None:
    fields, right, wrong = case
    grammar = grammar_of(fields)
    assert grammar is not None
    vocabulary = LLTokenizer(tokenizer.as_json().decode())
    for text in [*right, *wrong]:
        matcher = LLMatcher(vocabulary, grammar.text)
        token_ids = tokenizer.encode(text, False)
        is_whole = matcher.try_consume_tokens(token_ids) == len(token_ids) and matcher.is_accepting()
        assert is_whole == (text in right), text


ODD = [*range(1, 32), 0x7F, 0x80, 0xA0, 0xAD, 0x200B, 0x2028, 0xFEFF, 0xFFFD, 0xFFFF, 0x1F600, 0x10FFFF]
LETTERS = LLTokenizer("byte")


def test_any_character_in_a_choice() -> None:
    texts = [f"a{chr(code)}b" for code in [*ODD, *map(ord, "\"\\/#'[]")]]
    grammar = grammar_of(structured(choice=[*texts, ""]))
    assert grammar is not None
    start = LLMatcher(LETTERS, grammar.text, log_level=0)
    assert start.is_accepting(), start.get_error()
    for text in texts:
        matcher = start.deep_copy()
        assert matcher.consume_tokens(list(text.encode())) and matcher.is_accepting(), text


def test_a_regex_that_ends_in_an_escape() -> None:
    assert grammar_of(structured(regex="a\\\\")) is not None
    with pytest.raises(InvalidRequestError, match=r"structured_outputs.regex: ends within an escape"):
        grammar_of(structured(regex="a\\"))


def test_options_that_ask_for_nothing() -> None:
    for fields in ({}, {"response_format": None, "structured_outputs": None}, formatted("text")):
        assert grammar_of(fields) is None


UNSUPPORTED: dict[str, tuple[dict[str, Any], str]] = {
    "keyword": ({"type": "object", "not": {"type": "string"}}, "not"),
    "another": ({"type": "array", "uniqueItems": True}, "uniqueItems"),
    "leniently": ({"x-guidance": {"lenient": True}, "dependentRequired": {"a": ["b"]}}, "dependentRequired"),
    "no options": ({"x-guidance": 1}, "x-guidance: must be an object"),
    "format": ({"type": "string", "format": "colour"}, "colour"),
    "type": ({"type": "colour"}, "colour"),
    "far away": ({"$ref": "http://example.com/schema"}, "example.com"),
    "itself": ({"allOf": [{"$ref": "#"}]}, "leads back to itself"),
    "contradiction": ({"allOf": [{"type": "string"}, {"type": "integer"}]}, "nsatisfiable"),
}


@pytest.mark.parametrize("case", UNSUPPORTED.values(), ids=UNSUPPORTED)
def test_unsupported_options_are_named(router: Any, case: tuple[dict[str, Any], str]) -> None:
    schema, named = case
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2}
    body |= formatted("json_schema", json_schema={"name": "x", "schema": schema})
    answer = router.http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == "response_format.json_schema.schema"
    assert named in error["message"]


EXPLOSIVE = {
    "nested repetition": structured(regex="((a{1,500}b?){1,500}c?){1,500}"),
    "many optional fields": structured(
        json={"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(1500)}}
    ),
    "long alternatives": structured(regex="(" + "|".join(f"x{i}.*y{i}" for i in range(2000)) + ")*z"),
    "deep": structured(json='{"items":' * 500 + "{}" + "}" * 500),
    "negated": structured(regex="(.*a.{20}){30}"),
    "long minimum": structured(json={"type": "array", "minItems": 10**9, "items": {"type": "string"}}),
}


@pytest.fixture(scope="module")
def preprocessor(tokenizer: Tokenizer) -> Iterator[Preprocessor]:
    made = Preprocessor(ServeConfig(), tokenizer)
    yield made
    made.close()


def test_constant_grammars_are_compiled_at_the_start(
    make_router: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    router = make_router(prepares=True)
    router.add_worker()
    state = router.server.state
    eventually(lambda: len(state.grammars._known) == len(state.chats.constant_grammars))
    monkeypatch.setattr(state.preprocessor, "run", None)  # from here on compiling would fail
    for fields in (formatted("json_object"), structured(json_object=True)):
        body = {"prompt": "x", "max_tokens": 2, **fields}
        assert router.http.post("/v1/completions", json=body).status_code == 200


@pytest.mark.parametrize("fields", EXPLOSIVE.values(), ids=EXPLOSIVE)
def test_a_verdict_comes_soon_and_holds_no_memory(preprocessor: Preprocessor, fields: dict[str, Any]) -> None:
    """This holds for accepted and refused grammars."""

    async def check() -> None:
        compiler = GrammarCompiler(preprocessor)
        request = request_of(fields)
        assert request is not None
        for _ in range(2):
            with suppress(InvalidRequestError):
                await compiler.compile(request.asked())
        assert len(compiler._known) <= 1

    asyncio.run(check())


def test_the_cache_of_outcomes_is_bounded(
    preprocessor: Preprocessor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router.preprocessing.client.MAX_KNOWN_BYTES", 800)

    async def check() -> None:
        compiler = GrammarCompiler(preprocessor)
        for text in ("a", "b", "a", "c"):
            request = request_of(structured(choice=[text]))
            assert request is not None
            assert text in await compiler.compile(request.asked())
        assert len(compiler._known) == 2
        assert compiler._known_bytes <= 800

    asyncio.run(check())


BYTES = LLTokenizer("byte")


def matcher(grammar: str) -> LLMatcher:
    made = grammar_of({"structured_outputs": {"grammar": grammar}})
    assert made is not None
    return LLMatcher(BYTES, made.text, log_level=0)


def takes(grammar: str, text: str) -> bool:
    at, tokens = matcher(grammar), list(text.encode())
    assert not at.is_error(), at.get_error()
    return at.try_consume_tokens(tokens) == len(tokens) and at.is_accepting()


GBNF_CASES: dict[str, tuple[list[str], list[str]]] = {
    r'root ::= "a\u00e9\u0041\u1234\U0001F600"': (["aéA\u1234\U0001f600"], ["a"]),
    r'root ::= "\x41\x7f\x01\xe9"': (["A\x7f\x01é"], []),
    'root ::= "a\x7f\n\tb"': (["a\x7f\n\tb"], ["ab"]),
    r'root ::= "\[it\'s \"q\" \\ \n/#]"'.replace("\\'", "'"): (['[it\'s "q" \\ \n/#]'], []),
    r'root ::= "" | "a"': (["", "a"], ["b"]),
    r"root ::= [\u00e9-\u00ff]": (["é", "ÿ"], ["a"]),
    r"root ::= [\U0001F600-\U0001F64F]": (["\U0001f601"], ["a"]),
    r"root ::= [a&&b]": (["a", "&", "b"], ["c"]),
    r"root ::= [a~~b]": (["a", "~", "b"], []),
    r"root ::= [+--]": (["+", ",", "-"], [".", "*"]),
    r"root ::= [--/]": (["-", ".", "/"], [","]),
    r"root ::= [-a]": (["-", "a"], ["b"]),
    r"root ::= [a-]": (["-", "a"], ["b"]),
    r"root ::= [a^[]": (["a", "^", "["], ["]"]),
    r"root ::= [^^\]]": (["a"], ["^", "]", "ab"]),
    r"root ::= [\x30-\x39]+": (["12"], ["a"]),
    r'root ::= [^"\\\x7F\x00-\x1F]*': (["ab é/"], ['"', "\\", "\x7f", "\n"]),
    "root ::= .": (["a", "\n", "\U0010ffff"], ["", "ab"]),
    'root ::= one # "not ::= a rule\none ::= "a"': (["a"], ["b"]),
    'root ::= item*\nitem ::= "start: x" | [ \\t]': (["start: x "], ["start"]),
}


@pytest.mark.parametrize("grammar", GBNF_CASES)
def test_texts(grammar: str) -> None:
    right, wrong = GBNF_CASES[grammar]
    assert [text for text in right if not takes(grammar, text)] == []
    assert [text for text in wrong if takes(grammar, text)] == []


@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        (r'root ::= "\ud83d"', r"\ud83d is no character"),
        (r'root ::= "\U00110000"', r"\U00110000 is no character"),
        (r"root ::= [\d]", r"\d is no escape of GBNF"),
        ('root ::= "a', "end of input"),
        ('root ::= "a\\"', "is no escape"),
        ("root ::= [a", "end of input"),
        ("expr ::= expr", "No 'root' rule"),
        ("root ::= " + "(" * 5000, "recursion"),
    ],
)
def test_errors_name_what_is_wrong(grammar: str, reason: str) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        matcher(grammar)
    assert refused.value.field == "structured_outputs.grammar" and reason in refused.value.message


def test_lark_is_not_mistaken_for_gbnf() -> None:
    assert takes('start: "::=" /a ::= b/\n// root ::= "x"', "::=a ::= b")
    assert matcher("hello").is_error()
