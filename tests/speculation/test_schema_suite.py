"""A part of the JSON schema suite in fp32: answers are valid, and drafts change no token."""

from __future__ import annotations

import json

from tokenizers import Tokenizer

from protocol.requests import EngineRequest
from protocol.sampling import SamplingParams
from protocol.speculation import RequestSpeculation
from router.decoding import decode_body
from router.grammars.structured_outputs import grammar_request, requested_grammar
from router.openai_types import CompletionBody
from tests.speculation.engines import DRAFT, TARGET, make_engine
from tests.speculation.schema_suite import EOS_BIAS, MAX_TOKENS, Case, is_valid, load
from tests.speculation.small_engine import run

CASES = load()[::28]


def request(tokenizer: Tokenizer, case: Case, drafts: bool) -> EngineRequest:
    body = case.request()
    asked = grammar_request(decode_body(json.dumps(body).encode(), CompletionBody))
    grammar = None if asked is None else requested_grammar(asked, {})
    assert grammar is not None
    return EngineRequest(
        request_id=case.name,
        prompt_token_ids=tokenizer.encode(body["prompt"]).ids,
        sampling=SamplingParams(
            max_tokens=MAX_TOKENS,
            temperature=1.0,
            seed=case.seed,
            logit_bias={int(token): bias for token, bias in EOS_BIAS.items()},
            grammar=grammar.text,
        ),
        speculation=RequestSpeculation(enabled=drafts),
    )


def test_answers_are_valid_and_the_same_without_drafts() -> None:
    tokenizer = Tokenizer.from_file(str(TARGET / "tokenizer.json"))
    engine, _ = make_engine(TARGET, DRAFT, num_speculative_tokens=4)
    plain, drafted = (
        run(engine, [request(tokenizer, case, drafts) for case in CASES]) for drafts in (False, True)
    )
    assert sum(answer.drafted_tokens for answer in plain.values()) == 0
    for case in CASES:
        answer = drafted[case.name]
        assert (answer.token_ids, answer.finish_reason) == (plain[case.name].token_ids, "stop"), case.name
        assert is_valid(tokenizer.decode(answer.token_ids), case.schema), case.name
    counters = engine.counters()
    for method in ("draft_model", "grammar"):
        assert counters[f'spec_decode_num_accepted_tokens_total{{method="{method}"}}'] > 0
