"""Grammars: masks that follow the output, and the resulting tokens by each sampler."""

from __future__ import annotations

import random
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from llguidance import LLMatcher, LLTokenizer

from engine.engine import Engine
from engine.sampler import Grammars, SamplingRow, native
from engine.sampler.grammars import Vocabulary
from engine.sampler.rows import TokenMasks
from protocol.errors import InvalidRequestError
from protocol.requests import EngineRequest
from protocol.sampling import SamplingParams
from tests.engine.sampler.test_sampler_native import choose_both_ways
from tests.engine.sampler_reference import make_row
from tests.engine.sampling_cases import FILTERS, make_rows
from tests.engine.test_engine import tiny_engine

MODEL = Path(__file__).parents[3] / "models" / "tandem-code-10m"
ANY_LIST = 'start: "[" item ("," item)* "]"\nitem: /[a-z]{1,6}/'
LIST_AND_TEXT = ANY_LIST.replace('"]"', '"] is a list of words"')


class Fixed:
    """Masks of rows that have a grammar, by position."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size

    def allowed(self, row: SamplingRow) -> list[int]:
        count = row.position % 4 * 9
        return random.Random(row.position).sample(range(self._vocab_size), min(count, self._vocab_size))

    def masks(self, rows: Sequence[SamplingRow]) -> TokenMasks | None:
        constrained = [number for number, row in enumerate(rows) if row.params.grammar is not None]
        words = np.zeros((len(constrained), -(-self._vocab_size // 32) + 1), np.uint32)
        for index, number in enumerate(constrained):
            for token in self.allowed(rows[number]):
                words[index, token // 32] |= np.uint32(1 << token % 32)
        return TokenMasks(words.view(np.int32), constrained, len(rows)) if constrained else None

    def forget(self, request_id: str) -> None:
        pass


def masked_rows(vocab_size: int) -> list[SamplingRow]:
    """Return rows with all filters, with edits and without. Two of three have a grammar, which may allow
    nothing.
    """
    rows = make_rows(4 * len(FILTERS), random.Random(vocab_size))
    for number, row in enumerate(rows):
        extra: dict[str, Any] = {"logit_bias": {0: 3.0}, "frequency_penalty": 0.5} if number % 5 == 0 else {}
        grammar = "a" if number % 3 else None
        filters = list(FILTERS.values())[number % len(FILTERS)]
        rows[number] = make_row(row.request_id, seed=number, grammar=grammar, **filters, **extra)
        rows[number].position = row.position
    return rows


@pytest.mark.skipif(native.compiled() is None, reason="needs a C++ compiler")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("vocab_size", [3, 64, 333])
def test_masked_tokens_are_never_chosen_and_all_samplers_agree(vocab_size: int, dtype: torch.dtype) -> None:
    torch.manual_seed(vocab_size)
    rows, fixed = masked_rows(vocab_size), Fixed(vocab_size)
    logits = (3 * torch.randn(len(rows), vocab_size)).to(dtype)
    found, failed = choose_both_ways(logits, rows, fixed)
    barren = [n for n, row in enumerate(rows) if row.params.grammar is not None and not fixed.allowed(row)]
    assert failed == barren != []
    for number, (row, token) in enumerate(zip(rows, found, strict=True)):
        assert number in failed or row.params.grammar is None or token in fixed.allowed(row)


@pytest.fixture(scope="module")
def tokenizer() -> LLTokenizer:
    return LLTokenizer((MODEL / "tokenizer.json").read_text())


def fresh_words(tokenizer: LLTokenizer, row: SamplingRow) -> np.ndarray:
    masks = Grammars(lambda: Vocabulary.of(tokenizer)).masks([row])
    assert masks is not None
    return masks.words


def test_a_place_in_a_grammar_is_a_function_of_the_output(tokenizer: LLTokenizer) -> None:
    """In any order of outputs: longer ones, others after rejected drafts, forbidden drafts, complete ones,
    and the middle of a forced text.
    """
    texts = ["", "[", "[ab", "[ab,", "[ab,c", "[a]", "[ab,c]"]
    texts += ["[a] is", "[ab,c] is a list", "[a] is a list of words"]
    outputs = [tokenizer.tokenize_str(text) for text in texts]
    forbidden = [tokenizer.tokenize_str(text) for text in ("]", "[ab,,", "[1", "[abcdefghij", "[a] was")]
    asked = Grammars(lambda: Vocabulary.of(tokenizer))
    rng = random.Random(0)
    for output in rng.choices(outputs + forbidden, k=300):
        split = 0 if output in forbidden else rng.randint(0, len(output))
        row = make_row("r", output=output[:split], grammar=LIST_AND_TEXT)
        row.drafted = output[split:]
        found = asked.masks([row])
        assert found is not None
        assert (found.words == fresh_words(tokenizer, row)).all(), output
        assert found.words.any()
        assert (found.words == -1).all() == (output in forbidden)
        assert asked.allows(row, [tokenizer.eos_token]) == (output == outputs[-1])
        assert output in forbidden or (found.words[0, 0] & 1) == (output == outputs[-1])


def test_a_place_follows_an_output_that_grows(tokenizer: LLTokenizer) -> None:
    """Token by token, with rejected drafts in between."""
    asked, row = Grammars(lambda: Vocabulary.of(tokenizer)), make_row("r", grammar=LIST_AND_TEXT)
    for token in tokenizer.tokenize_str("[ab,c] is a list of words"):
        asked.allows(row, tokenizer.tokenize_str("abc,d]"))
        found = asked.masks([row])
        assert found is not None and (found.words == fresh_words(tokenizer, row)).all()
        assert asked.allows(row, [token])
        row.output_token_ids.append(token)
    assert asked.forced(row) == [] and asked.allows(row, [tokenizer.eos_token])


def test_forced_texts_are_the_only_allowed_ones(tokenizer: LLTokenizer) -> None:
    """A forced token equals llguidance's own mask. Elsewhere there is a choice."""
    grammars, forced = Grammars(lambda: Vocabulary.of(tokenizer)), 0
    output = tokenizer.tokenize_str("[ab,c] is a list of words")
    matcher = grammars.compile(LIST_AND_TEXT).result().deep_copy()
    for place, token in enumerate(output):
        row = make_row("r", output=output[:place], grammar=LIST_AND_TEXT)
        tokens = np.flatnonzero(
            np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
        )
        assert grammars.forced(row)[:1] == (tokens.tolist() if len(tokens) == 1 else [])
        forced += len(tokens) == 1
        matcher.consume_token(token)
    assert forced > 4


def test_if_llguidance_fails_no_token_is_allowed(tokenizer: LLTokenizer) -> None:
    """A grammar may reach its limit of work even in the middle of a draft."""
    asked, row = (
        Grammars(lambda: Vocabulary.of(tokenizer)),
        make_row("r", output=tokenizer.tokenize_str("["), grammar=ANY_LIST),
    )
    for drafted in ([], tokenizer.tokenize_str("ab,")):
        row.drafted = drafted
        asked._matcher_of(row)._matcher.consume_token(tokenizer.eos_token)
        found = asked.masks([row])
        assert found is not None and not found.words.any()
        again = asked.masks([row])
        assert again is not None and (again.words == fresh_words(tokenizer, row)).all()


def test_grammars_are_cached_while_in_use(tokenizer: LLTokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.sampler.grammars.MAX_COMPILED", 2)
    grammars = Grammars(lambda: Vocabulary.of(tokenizer))
    one, two, three = (f'start: "{name}"' for name in ("one", "two", "three"))
    first = grammars.compile(one)
    grammars.compile(two)
    assert grammars.compile(one) is first
    grammars.compile(three)
    assert grammars.compile(one) is first and grammars.compile.cache_info().currsize == 2


@pytest.fixture(scope="module")
def engine() -> Engine:
    return tiny_engine(MODEL, max_model_len=256, max_num_seqs=4, kv_cache_memory_bytes=8 << 20)


def ask(request_id: str, grammar: str, **sampling: Any) -> EngineRequest:
    params = SamplingParams(max_tokens=60, grammar=grammar, **sampling)
    return EngineRequest(request_id=request_id, prompt_token_ids=[5, 6, 7], sampling=params)


def test_a_request_without_an_allowed_token_fails_alone(engine: Engine, tokenizer: LLTokenizer) -> None:
    """All tokens that begin with `b` are banned, and the grammar requires one after the `a`."""
    banned = [[token] for prefix in (b"b", b"ab") for token in beginning_with(prefix, tokenizer)]
    engine.add(ask("stuck", 'start: "a" /bc*/', banned_token_sequences=banned))
    engine.add(ask("free", ANY_LIST, seed=2))
    ends, text = {}, []
    while engine.has_work():
        for output in engine.step().outputs:
            if output.request_id == "free":
                text += output.token_ids
            if output.finish_reason is not None:
                ends[output.request_id] = (output.finish_reason, output.error_kind)
                if output.request_id == "stuck":
                    assert "no token may follow its 1 tokens" in (output.error or "")
    assert ends == {"stuck": ("error", "grammar"), "free": ("stop", None)}
    assert tokenizer.decode_str(text).startswith("[")


def beginning_with(prefix: bytes, tokenizer: LLTokenizer) -> list[int]:
    tokens = range(1, tokenizer.vocab_size)
    return [token for token in tokens if tokenizer.decode_bytes([token]).startswith(prefix)]


def test_an_invalid_grammar_is_refused(engine: Engine) -> None:
    with pytest.raises(InvalidRequestError, match="ignore_eos"):
        engine.add(ask("r", ANY_LIST, ignore_eos=True))
    assert not engine.has_work()
    engine.add(ask("r", "start: )("))
    ends = [output for _ in iter(engine.has_work, False) for output in engine.step().outputs]
    assert [(end.finish_reason, end.error_kind) for end in ends] == [("error", "invalid")]


def test_other_requests_run_while_a_grammar_is_compiled(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A handed-over request waits for it as well."""
    compiling, threads, woken = threading.Event(), [], threading.Event()

    def compiled(*args: Any, **options: Any) -> LLMatcher:
        threads.append(threading.current_thread())
        assert compiling.wait(60)
        return LLMatcher(*args, **options)

    monkeypatch.setattr("engine.sampler.grammars.LLMatcher", compiled)
    monkeypatch.setattr(engine, "on_ready", woken.set)
    grammar = 'start: "compiled"'
    stream = SamplingParams(max_tokens=40, ignore_eos=True)
    engine.add(EngineRequest(request_id="stream", prompt_token_ids=[5, 6], sampling=stream))
    handed_over = engine.reserve(ask("handed over", grammar))
    assert handed_over is not None
    engine.activate(handed_over, 5, 3)
    engine.add(ask("new", grammar))
    came = [output.request_id for _ in range(30) for output in engine.step().outputs]
    assert came == ["stream"] * 30 and not woken.is_set()
    compiling.set()
    assert woken.wait(60)
    ends = {}
    while engine.has_work():
        ends |= {each.request_id: each.finish_reason for each in engine.step().outputs if each.finish_reason}
    assert ends == {"stream": "length", "handed over": "error", "new": "stop"}
    assert len(threads) == 1 and threads[0] is not threading.current_thread()
