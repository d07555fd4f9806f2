"""Texts of grammars are valid and equal those without drafts, also for a part of the JSON schema suite.

`schema_suite.jsonl` has some schemas of https://github.com/json-schema-org/JSON-Schema-Test-Suite (MIT, see
`schema_suite.LICENSE`): the suite's file and the case's description, a seed with which the answer ends, and
the schema.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from decimal import Decimal, InvalidOperation, localcontext
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import pytest
import torch
from jsonschema.validators import Draft202012Validator, validator_for
from llguidance import LLMatcher
from tokenizers import Tokenizer

from engine.engine import Engine
from engine.sampler.grammars import Matcher
from engine.step.draft import Draft, Verdict
from engine.step.sequence import SequenceState
from protocol.outputs import TokenOutput
from protocol.requests import EngineRequest
from protocol.sampling import SamplingParams
from protocol.speculation import Method, RequestSpeculation
from router.decoding import decode_body
from router.grammars.structured_outputs import grammar_request, requested_grammar
from router.openai_types import CompletionBody
from tests.speculation.engines import DRAFT, TARGET, make_engine
from tests.speculation.small_engine import run, tokens

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 999},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 3},
        "ok": {"type": "boolean"},
    },
    "required": ["name", "age", "tags", "ok"],
    "additionalProperties": False,
}
GRAMMAR = LLMatcher.grammar_from_json_schema(json.dumps(SCHEMA), overrides={"whitespace_flexible": False})
METHODS: dict[str, dict[str, Any]] = {
    "draft_model": {},
    "tree": {"tree": True},
    "ngram": {},
    "standard": {"verification": "standard"},
}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(TARGET / "tokenizer.json"))


def requests(tokenizer: Tokenizer, method: Method | None = None) -> list[EngineRequest]:
    """Return requests of which the last one has no grammar."""
    asked = RequestSpeculation(method=method, num_speculative_tokens=4)
    return [
        EngineRequest(
            request_id=f"r{number}",
            prompt_token_ids=tokenizer.encode("def main(arguments):\n    return " + "x" * number).ids,
            sampling=SamplingParams(
                max_tokens=150, temperature=temperature, seed=number, grammar=GRAMMAR if number < 5 else None
            ),
            speculation=asked if method is not None else None,
        )
        for number, temperature in enumerate([1.0, 0.0, 2.0, 0.7, 1.5, 1.0])
    ]


def answers(engine: Engine, tokenizer: Tokenizer, method: Method) -> dict[str, TokenOutput]:
    """Run all requests at once, and check those with a grammar."""
    found = run(engine, requests(tokenizer, method))
    for number in range(5):
        answer = found[f"r{number}"]
        assert answer.finish_reason == "stop", answer
        jsonschema.validate(json.loads(tokenizer.decode(answer.token_ids)), SCHEMA)
    return found


@pytest.fixture(scope="module")
def plain(tokenizer: Tokenizer) -> dict[str, list[int]]:
    """Return the answers without speculation, one by one, without masks computed beside the forward."""
    engine, _ = make_engine(TARGET, None)
    engine._sampler.expect = lambda rows: None
    found = {}
    for request in requests(tokenizer):
        alone = msgspec.structs.replace(request, speculation=RequestSpeculation(enabled=False))
        found |= run(engine, [alone])
    assert sum(output.drafted_tokens for output in found.values()) == 0
    return tokens(found)


def test_forced_tokens_are_drafted_without_a_method(
    tokenizer: Tokenizer, plain: dict[str, list[int]]
) -> None:
    engine, _ = make_engine(TARGET, None)
    found = run(engine, requests(tokenizer))
    assert tokens(found) == plain
    assert all((output.accepted_tokens > 10) == (name != "r5") for name, output in found.items())


def test_the_first_nodes_of_a_draft_are_the_forced_tokens() -> None:
    tree = Draft([7, 8, 9, 6], [-1, 0, 0, 2])
    assert tree.path(3) == [7, 9, 6] and tree.path(-1) == []
    assert (tree.first(3).token_ids, tree.first(3).parents) == ([7, 8, 9], [-1, 0, 0])
    chain = Draft([1, 2, 3], distributions=torch.eye(3)).first(2)
    assert chain.token_ids == [1, 2] and chain.parents is None
    assert chain.distributions is not None and chain.distributions.tolist() == [[1, 0, 0], [0, 1, 0]]


@pytest.mark.parametrize("method", METHODS)
def test_texts_are_valid_and_equal_those_without_speculation(
    tokenizer: Tokenizer, plain: dict[str, list[int]], method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The masks are ready when verification needs them."""
    engine, speculator = make_engine(TARGET, DRAFT, num_speculative_tokens=4, **METHODS[method])
    fill, verify, late = Matcher.fill, speculator.verify, []

    def noted_verify(sequences: Sequence[SequenceState], logits: torch.Tensor) -> list[Verdict]:
        with monkeypatch.context() as patch:
            patch.setattr(Matcher, "fill", noted_fill)
            return verify(sequences, logits)

    def noted_fill(matcher: Matcher, *arguments: Any) -> None:
        late.append(threading.current_thread() is threading.main_thread())
        fill(matcher, *arguments)

    monkeypatch.setattr(speculator, "verify", noted_verify)
    name: Method = "ngram" if method == "ngram" else "draft_model"
    found = answers(engine, tokenizer, name)
    assert (tokens(found) == plain) == (method != "standard")
    assert not any(late)
    counters = engine.counters()
    assert counters['spec_decode_num_accepted_tokens_total{method="grammar"}'] > 50
    assert counters.get(f'spec_decode_cut_tokens_total{{method="{name}"}}', 0) > 0
    drafted = sum(counters[f'spec_decode_num_draft_tokens_total{{method="{m}"}}'] for m in (name, "grammar"))
    assert drafted == sum(output.drafted_tokens for output in found.values())


SUITE = Path(__file__).with_name("schema_suite.jsonl")
CASES: list[dict[str, Any]] = [json.loads(line) for line in SUITE.read_text("utf-8").splitlines()]
END_BIAS = {0: 12.0}
"""Raises the chance of the end of text: trained on code alone, the model would never end a number."""


def request(tokenizer: Tokenizer, case: dict[str, Any], drafts: bool) -> EngineRequest:
    prompt = f"# {case['name'].partition(': ')[2]}\nvalue = json.loads('"
    wanted = {"name": "case", "strict": True, "schema": case["schema"]}
    body = {"prompt": prompt, "response_format": {"type": "json_schema", "json_schema": wanted}}
    asked = grammar_request(decode_body(json.dumps(body).encode(), CompletionBody))
    grammar = None if asked is None else requested_grammar(asked, {})
    assert grammar is not None
    return EngineRequest(
        request_id=case["name"],
        prompt_token_ids=tokenizer.encode(prompt).ids,
        sampling=SamplingParams(
            max_tokens=200, temperature=1.0, seed=case["seed"], logit_bias=END_BIAS, grammar=grammar.text
        ),
        speculation=RequestSpeculation(enabled=drafts),
    )


def decimal(text: str) -> Decimal | float:
    """Parse a number. JSON's numbers have no bounds, but decimals' exponents do."""
    try:
        return Decimal(text)
    except InvalidOperation:
        return float(text)


def is_valid(text: str, schema: dict[str, Any]) -> bool:
    """Validate by jsonschema, formats included, with decimals: as a float 0.0039 is no multiple of 0.0001."""
    kind = validator_for(schema, default=Draft202012Validator)
    exact = json.loads(json.dumps(schema), parse_float=decimal)
    with localcontext(prec=800):
        value = json.loads(text, parse_float=decimal)
        return bool(kind(exact, format_checker=kind.FORMAT_CHECKER).is_valid(value))


def test_answers_are_valid_and_the_same_without_drafts() -> None:
    tokenizer = Tokenizer.from_file(str(TARGET / "tokenizer.json"))
    engine, _ = make_engine(TARGET, DRAFT, num_speculative_tokens=4)
    plain, drafted = (
        run(engine, [request(tokenizer, case, drafts) for case in CASES]) for drafts in (False, True)
    )
    assert sum(answer.drafted_tokens for answer in plain.values()) == 0
    for case in CASES:
        name = case["name"]
        answer = drafted[name]
        assert (answer.token_ids, answer.finish_reason) == (plain[name].token_ids, "stop"), name
        assert is_valid(tokenizer.decode(answer.token_ids), case["schema"]), name
    counters = engine.counters()
    for method in ("draft_model", "grammar"):
        assert counters[f'spec_decode_num_accepted_tokens_total{{method="{method}"}}'] > 0
