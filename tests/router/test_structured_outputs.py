"""What clients ask of structured outputs becomes a grammar of just those texts, or a 400 that says why."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from protocol.config import ServeConfig
from protocol.errors import InvalidRequestError
from router.decoding import decode_body
from router.errors import ApiError
from router.grammar_compiler import MAX_AT_ONCE, GrammarCompiler
from router.openai_types import CompletionBody
from router.structured_outputs import Grammar, requested_grammar
from router.tokenizer import Tokenizer

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
TAG = {
    "structures": [{"begin": "<call=f>", "schema": PERSON, "end": "</call>"}],
    "triggers": ["<call"],
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
    raw = json.dumps({"prompt": "x", **fields}).encode()
    return requested_grammar(decode_body(raw, CompletionBody), frozenset())


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_grammar_has_just_the_texts(
    tokenizer: Tokenizer, case: tuple[dict[str, Any], list[str], list[str]]
) -> None:
    fields, right, wrong = case
    grammar = grammar_of(fields)
    assert grammar is not None
    vocabulary = LLTokenizer(tokenizer.as_json())
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


def test_what_asks_for_nothing() -> None:
    for fields in ({}, {"response_format": None, "structured_outputs": None}, formatted("text")):
        assert grammar_of(fields) is None


UNSUPPORTED: dict[str, tuple[dict[str, Any], str]] = {
    "keyword": ({"type": "object", "not": {"type": "string"}}, "not"),
    "another": ({"type": "array", "uniqueItems": True}, "uniqueItems"),
    "leniently": ({"x-guidance": {"lenient": True}, "dependentRequired": {"a": ["b"]}}, "dependentRequired"),
    "format": ({"type": "string", "format": "colour"}, "colour"),
    "type": ({"type": "colour"}, "colour"),
    "far away": ({"$ref": "http://example.com/schema"}, "example.com"),
    "contradiction": ({"allOf": [{"type": "string"}, {"type": "integer"}]}, "nsatisfiable"),
}


@pytest.mark.parametrize("case", UNSUPPORTED.values(), ids=UNSUPPORTED)
def test_what_is_not_supported_is_named(router: Any, case: tuple[dict[str, Any], str]) -> None:
    schema, named = case
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2}
    body |= formatted("json_schema", json_schema={"name": "x", "schema": schema})
    answer = router.http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == "response_format.json_schema.schema"
    assert named in error["message"]


def test_workers_get_the_grammar(router: Any) -> None:
    worker = next(worker for worker in router.workers if worker.role == "prefill")
    worker.generated.clear()
    fields = {"prompt": "x", "max_tokens": 2, "n": 2, **structured(regex="[ab]+")}
    assert router.http.post("/v1/completions", json=fields).status_code == 200
    wanted = grammar_of(structured(regex="[ab]+"))
    assert wanted is not None
    assert [request.sampling.grammar for request in worker.generated] == [wanted.text] * 2


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


@pytest.mark.parametrize("fields", EXPLOSIVE.values(), ids=EXPLOSIVE)
def test_a_verdict_comes_soon_and_leaves_no_more_than_itself(
    tokenizer: Tokenizer, fields: dict[str, Any]
) -> None:
    """Whatever it is."""

    async def check() -> None:
        compiler = GrammarCompiler(tokenizer)
        started = time.monotonic()
        for _ in range(2):
            try:
                grammar = grammar_of(fields)
                assert grammar is not None
                await compiler.check(grammar)
            except InvalidRequestError:
                pass
        took = time.monotonic() - started
        assert took < 20  # seconds of a busy machine; 0.2 are usual
        assert len(compiler._problems) <= 1
        compiler.close()

    asyncio.run(check())


ENDLESS = Grammar(
    LLMatcher.grammar_from_json_schema(
        {"allOf": [{"type": "string", "pattern": f"a.{{{count}}}b"} for count in range(1, 40)]}
    ),
    "f",
)
"""No limit of llguidance's ends it."""
SOON = Grammar('start: "a"', "f")


def forks(compiler: GrammarCompiler) -> str:
    assert compiler._process is not None
    pid = compiler._process._process.pid
    return Path(f"/proc/{pid}/task/{pid}/children").read_text()


def test_what_takes_too_long_is_refused_and_gone(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def check() -> None:
        compiler = GrammarCompiler(tokenizer)
        await compiler.check(SOON)
        monkeypatch.setattr("router.grammar_compiler.COMPILE_TIMEOUT_S", 0.1)
        refusals = [compiler.check(ENDLESS) for _ in range(MAX_AT_ONCE + 1)]
        for refused in await asyncio.gather(*refusals, return_exceptions=True):
            assert str(refused) == "f: it cannot be compiled within 0.1 s"
        while forks(compiler):  # until the kernel has ended them
            await asyncio.sleep(0.01)
        assert len(compiler._problems) == 1 and not compiler._process._asked  # type: ignore[union-attr]
        compiler.close()

    asyncio.run(check())


def test_nobody_waits_while_a_grammar_is_compiled(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither the event loop nor another grammar."""
    monkeypatch.setattr("router.grammar_compiler.COMPILE_TIMEOUT_S", 60.0)

    async def check() -> None:
        compiler = GrammarCompiler(tokenizer)
        endless = asyncio.ensure_future(compiler.check(ENDLESS))
        await compiler.check(SOON)
        assert not endless.done()
        endless.cancel()
        compiler.close()

    asyncio.run(check())


def test_a_compiler_that_ends_is_started_anew(tokenizer: Tokenizer) -> None:
    async def check() -> None:
        compiler = GrammarCompiler(tokenizer)
        await compiler.check(SOON)
        ended = compiler._process
        assert ended is not None
        ended.close()
        with pytest.raises(ApiError, match="has ended"):
            await ended.ask(SOON.text, 1.0)
        await compiler.check(Grammar('start: "b"', "f"))
        compiler.close()

    asyncio.run(check())


def test_verdicts_are_kept_within_a_bound(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.grammar_compiler.MAX_KNOWN", 2)

    async def check() -> None:
        compiler = GrammarCompiler(tokenizer)
        for text in ("a", "b", "a", "c"):
            await compiler.check(Grammar(f'start: "{text}"', "f"))
        assert len(compiler._problems) == 2
        compiler.close()

    asyncio.run(check())
