"""Drafts without weights: prompt lookup, and how such methods, trees and batches run in an engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from costs.drafting import FIRST_RATE
from engine.engine import Engine
from engine.step.sequence import SequenceState
from protocol.requests import EngineRequest
from protocol.speculation import WEIGHTLESS, Method, RequestSpeculation, SpeculativeConfig
from speculation.speculator import BatchSpeculator
from speculation.weightless.ngram import NgramDrafter, Text, TextDrafter
from tests.speculation.decoding import chains, decoding
from tests.speculation.engines import ticks
from tests.speculation.small_engine import ask, drafting, native_config, prompt_of, run, tokens

SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {"ignore_eos": True},
    "seeded": {"temperature": 0.8, "seed": 11, "ignore_eos": True},
    "of few tokens": {"allowed_token_ids": [5, 6, 7], "ignore_eos": True},
}
"""The tiny model hardly repeats itself without such limits."""


def requests(sampling: dict[str, Any], max_tokens: int = 40) -> list[EngineRequest]:
    """Return a repetitive prompt, a varied one, one longer than a step, and one seen before."""
    repeated = prompt_of(12, seed=1)
    prompts = [repeated * 3, prompt_of(20, seed=2), prompt_of(90, seed=3), [*repeated * 3, 5]]
    return [ask(str(index), prompt, max_tokens, **sampling) for index, prompt in enumerate(prompts)]


@pytest.fixture(scope="module")
def plain(target: Path) -> dict[str, dict[str, list[int]]]:
    """Return each request's tokens without speculation, by kind of sampling."""
    engine = Engine(native_config(target))
    return {kind: tokens(run(engine, requests(sampling))) for kind, sampling in SAMPLING.items()}


def engine_with(target: Path, method: Method, count: int) -> Engine:
    return drafting(native_config(target), method=method, num_speculative_tokens=count)


def test_beyond_the_ends_of_a_tree_acceptance_is_zero(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """lookahead's paths are three tokens long, so a fourth token is never accepted."""
    ticks(monkeypatch)
    engine = engine_with(target, "lookahead", 8)
    run(engine, requests(SAMPLING["of few tokens"], max_tokens=160))
    state = engine.speculation()
    assert state is not None
    assert state.methods[0].acceptance[3] < FIRST_RATE / 2


def test_a_tree_fits_beside_a_single_sequence(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ticks(monkeypatch)
    engine = drafting(native_config(target, max_num_seqs=1), method="lookahead")
    run(engine, [ask("a", prompt_of(16), 120, **SAMPLING["of few tokens"])])
    counters = engine.counters()
    assert (
        counters['spec_decode_steps_total{drafts="yes"}'] > counters['spec_decode_steps_total{drafts="no"}']
    )


def drafter_of(engine: Engine, method: Method) -> TextDrafter:
    assert isinstance(engine._speculator, BatchSpeculator)
    drafter = engine._speculator._drafters[method]
    assert isinstance(drafter, TextDrafter)
    return drafter


@pytest.mark.parametrize("method", WEIGHTLESS)
def test_repetitive_text_takes_fewer_steps(target: Path, method: Method) -> None:
    engine = engine_with(target, method, 5)
    run(engine, [ask("a", prompt_of(16), 120, **SAMPLING["of few tokens"])])
    assert engine.stats().steps < 0.8 * 120


def test_an_earlier_answer_speeds_up_the_same_request(target: Path) -> None:
    engine = engine_with(target, "suffix", 8)
    sampling = {"temperature": 1.0, "seed": 3, "ignore_eos": True}
    first = run(engine, [ask("first", prompt_of(20), 60, **sampling)])["first"]
    again = run(engine, [ask("again", prompt_of(20), 60, **sampling)])["again"]
    assert again.token_ids == first.token_ids
    assert again.accepted_tokens > 40 > first.accepted_tokens
    elsewhere = msgspec.structs.replace(ask("else", prompt_of(20), 60, **sampling), cache_salt="another")
    other = run(engine, [elsewhere])["else"]
    assert other.token_ids == first.token_ids
    assert (other.drafted_tokens, other.accepted_tokens) == (first.drafted_tokens, first.accepted_tokens)


def test_a_batch_may_mix_methods(target: Path, plain: dict[str, dict[str, list[int]]]) -> None:
    engine = Engine(native_config(target), speculate=BatchSpeculator)
    asked = [RequestSpeculation(method=method, num_speculative_tokens=4) for method in WEIGHTLESS]
    mixed = [
        msgspec.structs.replace(request, speculation=speculation)
        for request, speculation in zip(
            requests(SAMPLING["of few tokens"]), [*asked, RequestSpeculation(enabled=False)], strict=True
        )
    ]
    outputs = run(engine, mixed)
    assert tokens(outputs) == plain["of few tokens"]
    assert outputs["3"].drafted_tokens == 0
    assert all(outputs[name].drafted_tokens > 0 for name in ("0", "1", "2"))


def test_an_aborted_request_leaves_nothing(target: Path) -> None:
    for method in WEIGHTLESS:
        engine = engine_with(target, method, 5)
        for request in requests(SAMPLING["greedy"]):
            engine.add(request)
        for _ in range(8):
            engine.step()
        assert drafter_of(engine, method)._texts
        for name in ("0", "1", "2", "3"):
            engine.abort(name)
        assert not drafter_of(engine, method)._texts


def drafter(shortest: int = 2, longest: int = 5) -> NgramDrafter:
    options = SpeculativeConfig(method="ngram", prompt_lookup_min=shortest, prompt_lookup_max=longest)
    return NgramDrafter(options)


def draft(text: list[int], count: int, shortest: int = 2, longest: int = 5) -> list[int]:
    return chains(drafter(shortest, longest).propose([decoding(text)], [count]))[0]


def naive(text: list[int], count: int, shortest: int, longest: int) -> list[int]:
    for n in range(longest, shortest - 1, -1):
        for end in range(len(text) - 2, n - 2, -1):
            if n < len(text) and text[end - n + 1 : end + 1] == text[-n:]:
                known = list(text)
                for _ in range(count):
                    known.append(known[end + 1 + len(known) - len(text)])
                return known[len(text) :]
    return []


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ([1, 2, 3, 4, 5, 9, 1, 2], [3, 4, 5]),
        ([1, 2, 3, 7, 1, 2, 4, 8, 1, 2], [4, 8, 1]),  # the most recent of equal matches
        ([5, 1, 2, 3, 7, 6, 1, 2, 4, 8, 5, 1, 2], [3, 7, 6]),  # but a longer match is preferred
        # at most five tokens are compared
        ([9, 2, 3, 4, 5, 6, 0, 1, 2, 3, 4, 5, 7, 1, 2, 3, 4, 5], [7, 1, 2]),
        ([1, 2, 3, 9, 3], []),  # one token is too short a match
        ([1, 2, 3, 4], []),
        ([3], []),
        ([3, 3], []),
        ([6, 4, 4, 4], [4, 4, 4]),
        ([1, 2, 1, 2, 1], [2, 1, 2]),  # the drafted tokens themselves are searched, too
        ([8, 1, 2, 3, 1, 2], [3, 1, 2]),
    ],
)
def test_ngram_drafts_what_followed_before(text: list[int], want: list[int]) -> None:
    assert draft(text, 3) == want


def test_distant_matches_are_found() -> None:
    """The search skips blocks of 64 places. Random texts are seldom as long."""
    for distance in (63, 64, 65, 127, 128, 129, 500):
        text = [*range(1000, 1100), 1, 2, 3, *range(10, 10 + distance), 1, 2]
        assert draft(text, 2) == [3, 10], distance


TOKENS = st.integers(1, 3) | st.integers(1, 40)


@settings(deadline=None, max_examples=300)
@given(
    st.lists(st.lists(TOKENS, min_size=1, max_size=400), min_size=1, max_size=4),
    st.integers(1, 8),
    st.integers(1, 3),
    st.integers(0, 4),
)
def test_ngram_equals_a_naive_search(texts: list[list[int]], count: int, shortest: int, more: int) -> None:
    sequences: list[SequenceState] = [decoding(text, request_id=str(i)) for i, text in enumerate(texts)]
    counts = [count + i for i in range(len(texts))]
    got = chains(drafter(shortest, shortest + more).propose(sequences, counts))
    assert got == [
        naive(text, each, shortest, shortest + more) for text, each in zip(texts, counts, strict=True)
    ]


class CountingTokens(list[int]):
    """Counts the tokens that slices return."""

    num_read = 0

    def __getitem__(self, index):
        got = super().__getitem__(index)
        self.num_read += len(got) if isinstance(index, slice) else 1
        return got


@given(st.lists(st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=40), min_size=1, max_size=10))
def test_a_text_holds_all_tokens_after_any_change(pieces: list[list[int]]) -> None:
    sequence = decoding(pieces[0])
    text = Text(sequence)
    for piece in [[], *pieces[1:]]:
        for token in piece:
            sequence.append(token)
        text.update()
        assert text.tokens.tolist() == sequence.token_ids
        assert text.address == text.tokens.ctypes.data


def test_only_new_tokens_are_read() -> None:
    sequence = decoding(range(1000))
    text = Text(sequence)
    text.update()
    tokens = sequence.token_ids = CountingTokens(sequence.token_ids)
    for token in range(50):
        sequence.append(token)
        text.update()
    assert tokens.num_read <= 2 * 50
    assert text.tokens.tolist() == list(tokens)


def test_a_cut_sequence_is_read_again() -> None:
    sequence = decoding(range(100))
    text = Text(sequence)
    text.update()
    del sequence.token_ids[60:]
    text.update()
    assert text.tokens.tolist() == list(range(60))
    del sequence.token_ids[30:]
    sequence.token_ids += [7] * 50
    text.update()
    assert text.tokens.tolist() == [*range(30), *[7] * 50]


def test_a_reused_id_is_another_text() -> None:
    class Drafter(NgramDrafter):
        def tokens(self, *args: Any, **fields: Any) -> list[int]:
            return self._updated(decoding(*args, **fields)).tokens.tolist()

    drafter = Drafter(SpeculativeConfig(method="ngram"))
    assert drafter.tokens([1, 2, 3, 4], request_id="a") == [1, 2, 3, 4]
    assert drafter.tokens([1, 2, 9, 4, 5], request_id="a") == [1, 2, 9, 4, 5]
    assert drafter.tokens([8], request_id="b") == [8]
    drafter.forget("a")
    drafter.forget("never seen")
    assert drafter.tokens([8, 8], request_id="a") == [8, 8]
