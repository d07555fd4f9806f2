"""Grammars' masks computed beside the forward equal those of the rows that need them. fp32."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from llguidance import LLTokenizer

from engine.batch.runner import ForwardOutput
from engine.engine import Engine
from engine.sampler import Grammars, SamplingRow
from engine.sampler.grammars import Matcher, Vocabulary
from protocol.requests import EngineRequest
from protocol.sampling import SamplingParams
from tests.engine.sampler_reference import make_row
from tests.engine.test_engine import run, tiny_engine, tokens

MODEL = Path(__file__).parents[3] / "models" / "tandem-code-10m"
LIST = 'start: "[" item ("," item)* "] is a list of words"\nitem: /[a-z]{1,6}/'
NUMBER = "start: /[0-9]{30,200}/"


@pytest.fixture(scope="module")
def tokenizer() -> LLTokenizer:
    return LLTokenizer((MODEL / "tokenizer.json").read_text())


def check(grammars: Grammars, rows: Sequence[SamplingRow], tokenizer: LLTokenizer) -> None:
    """Check that rows get the same masks as without prediction."""
    found = grammars.masks(rows)
    assert found is not None
    assert found.rows == [number for number, row in enumerate(rows) if row.params.grammar is not None]
    for words, number in zip(found.words, found.rows, strict=True):
        alone = Grammars(lambda: Vocabulary.of(tokenizer)).masks([rows[number]])
        assert alone is not None and (words == alone.words).all()


def chain(row: SamplingRow, drafted: list[int]) -> list[SamplingRow]:
    """Return the row, and the rows after each of its drafted tokens."""
    ends = range(len(drafted) + 1)
    return [
        SamplingRow(row.params, row.prompt_token_ids, row.output_token_ids, 0, row.request_id, drafted[:end])
        for end in ends
    ]


def test_rows_may_come_in_any_order_and_batch(tokenizer: LLTokenizer) -> None:
    texts = ["", "[", "[ab,c", "[a] is"]
    outputs = [tokenizer.tokenize_str(text) for text in texts]
    rows = [
        row
        for name, output in enumerate(outputs)
        for row in chain(make_row(str(name), output=output, grammar=LIST), tokenizer.tokenize_str("[a,"))
    ]
    grammars, rng = Grammars(lambda: Vocabulary.of(tokenizer)), random.Random(0)
    for _ in range(3):
        grammars.expect(rows)
        others = [make_row("free"), make_row("new", output=outputs[1], grammar=LIST)]
        check(grammars, rows, tokenizer)
        check(grammars, rng.sample(rows, 7) + others, tokenizer)
        check(grammars, rows, tokenizer)


def test_a_mask_never_belongs_to_another_place(tokenizer: LLTokenizer) -> None:
    """Neither to a shorter output, nor to drafts after it, nor to another request or grammar with
    this name.
    """
    grammars = Grammars(lambda: Vocabulary.of(tokenizer))
    row = make_row("r", output=tokenizer.tokenize_str("[ab"), grammar=LIST)

    def expect() -> None:
        grammars.expect([row])
        grammars.wait()

    for text in ",]":
        row.drafted = tokenizer.tokenize_str(text)
        check(grammars, [row], tokenizer)
        expect()
    row.drafted = ()
    for text in ",c] is":
        expect()
        row.output_token_ids += tokenizer.tokenize_str(text)
        check(grammars, [row], tokenizer)
    size = len(row.output_token_ids)
    expect()
    replaced = tokenizer.tokenize_str("[" + "c," * size)[:size]
    check(grammars, [make_row("r", output=replaced, grammar=LIST)], tokenizer)
    expect()
    grammars.forget("r")
    check(grammars, [make_row("r", output=tokenizer.tokenize_str("7" * 9), grammar=NUMBER)], tokenizer)


def test_a_matcher_is_not_used_while_its_mask_is_computed(
    tokenizer: LLTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its request is not forgotten meanwhile either."""
    matcher_of, begun, asked, overlaps = Grammars._matcher_of, threading.Event(), threading.Event(), []

    def slow(grammars: Grammars, row: SamplingRow) -> Matcher:
        if threading.current_thread() is threading.main_thread():
            asked.set()
        else:
            begun.set()
            overlaps.append(asked.wait(0.05))
        return matcher_of(grammars, row)

    monkeypatch.setattr(Grammars, "_matcher_of", slow)
    grammars = Grammars(lambda: Vocabulary.of(tokenizer))
    outputs = [tokenizer.tokenize_str(text) for text in ("[ab", "[a] is")]
    first, second = (make_row("r", output=output, grammar=LIST) for output in outputs)
    other = make_row("other", output=outputs[0], grammar=LIST)
    rest = tokenizer.tokenize_str(" a list of words")

    def begin() -> None:
        asked.clear()
        begun.clear()
        grammars.expect([first])
        assert begun.wait(10)

    begin()
    assert grammars.forced(second) == rest
    begin()
    assert grammars.allows(second, rest)
    begin()
    check(grammars, [second], tokenizer)
    begin()
    grammars.forget("r")
    check(grammars, [other], tokenizer)
    assert [*grammars._matchers] == ["other"] and overlaps == [False] * 4


@pytest.fixture
def engine() -> Engine:
    """Make an engine with room for the KV of 112 tokens."""
    return tiny_engine(MODEL, max_model_len=48, max_num_seqs=4, block_size=8, kv_cache_memory_bytes=112 << 12)


def answers(engine: Engine, requests: Sequence[EngineRequest]) -> dict[str, list[int]]:
    for request in requests:
        engine.add(request)
    return {name: tokens(outputs) for name, outputs in run(engine).items()}


def requests() -> list[EngineRequest]:
    return [
        EngineRequest(
            request_id=str(number),
            prompt_token_ids=[number, *range(5, 25)],
            sampling=SamplingParams(max_tokens=24, seed=number, grammar=NUMBER if number else LIST),
        )
        for number in range(4)
    ]


def test_masks_are_computed_beside_the_forward(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """They begin before the forward, in one separate thread only."""
    fill, begun, threads = Matcher.fill, threading.Event(), []
    run_forward: Callable[..., ForwardOutput] = engine._runner.run

    def noted(matcher: Matcher, *arguments: Any) -> None:
        threads.append(threading.current_thread())
        begun.set()
        fill(matcher, *arguments)

    def forward(*arguments: Any, **options: Any) -> ForwardOutput:
        assert begun.wait(10)
        begun.clear()
        return run_forward(*arguments, **options)

    monkeypatch.setattr(Matcher, "fill", noted)
    monkeypatch.setattr(engine._runner, "run", forward)
    answers(engine, [msgspec.structs.replace(requests()[1], request_id="alone")])
    assert len(set(threads)) == 1 and threads[0] is not threading.current_thread()


def test_tokens_equal_those_without_the_thread(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sequences are preempted, and one with a grammar is aborted."""
    with monkeypatch.context() as patch:
        patch.setattr(engine._sampler, "expect", lambda rows: None)
        alone = {name: answer for each in requests() for name, answer in answers(engine, [each]).items()}
    assert engine.stats().num_preemptions == 0
    assert answers(engine, requests()) == alone
    assert engine.stats().num_preemptions > 0
    for each in requests():
        engine.add(each)
    for _ in range(5):
        engine.step()
    engine.abort("2")
    again = msgspec.structs.replace(requests()[0], request_id="2")
    assert answers(engine, [again])["2"] == alone["0"]
