"""A part of the JSON schema suite in fp32: answers are valid, and drafts change no token.

`schema_suite.jsonl` has some schemas of https://github.com/json-schema-org/JSON-Schema-Test-Suite (MIT, see
`schema_suite.LICENSE`): the suite's file and the case's description, a seed with which the answer ends, and
the schema.
"""

from __future__ import annotations

import json
from decimal import Decimal, InvalidOperation, localcontext
from pathlib import Path
from typing import Any

from jsonschema.validators import Draft202012Validator, validator_for
from tokenizers import Tokenizer

from protocol.requests import EngineRequest
from protocol.sampling import SamplingParams
from protocol.speculation import RequestSpeculation
from router.decoding import decode_body
from router.grammars.structured_outputs import grammar_request, requested_grammar
from router.openai_types import CompletionBody
from tests.speculation.engines import DRAFT, TARGET, make_engine
from tests.speculation.small_engine import run

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
            max_tokens=200,
            temperature=1.0,
            seed=case["seed"],
            logit_bias=END_BIAS,
            grammar=grammar.text,
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
