"""Suffix decoding: hand-checked drafts, the search compared with counts, kept outputs by age and tenant."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.engine import Engine
from protocol.requests import DraftPlan
from protocol.speculation import Method, RequestSpeculation, SpeculativeConfig
from speculation.weightless import ngram, suffix
from speculation.weightless.ngram import NOTHING
from speculation.weightless.suffix import Corpus, SuffixDrafter
from tests.speculation.decoding import chains, decoding
from tests.speculation.small_engine import ask, drafting, run, small_config, tokens
from tests.worker.tiny_model import write_tiny_llama


def options_of(**options: Any) -> SpeculativeConfig:
    names = {f"suffix_decoding_{name}": value for name, value in options.items()}
    return SpeculativeConfig(method="suffix", **names)


def drafter(**options: Any) -> SuffixDrafter:
    return SuffixDrafter(options_of(**options))


def keep(drafting: SuffixDrafter, output: list[int], salt: str = "") -> None:
    """Run a request with this output to its end."""
    drafting.begin(decoding([0], output, request_id="earlier", salt=salt), 0, None)
    drafting.forget("earlier")


def draft(drafting: SuffixDrafter, text: list[int], count: int, salt: str = "") -> list[int]:
    got = chains(drafting.propose([decoding(text, request_id="now", salt=salt)], [count]))[0]
    drafting._texts.pop("now")
    return got


def corpus(drafting: SuffixDrafter) -> Corpus:
    assert drafting._corpus is not None
    return drafting._corpus


# --- drafts -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "count", "want"),
    [
        ([1, 2, 3, 4, 5, 9, 1, 2, 3], 8, [4, 5, 9]),  # as many as matched
        ([1, 2, 3, 4, 5, 9, 1, 2, 3], 2, [4, 5]),
        ([1, 2, 5, 1, 2, 6, 1, 2, 6, 1, 2], 2, [6, 1]),  # the most frequent, not the first
        ([1, 2, 6, 1, 2, 5, 1, 2], 1, [5]),  # of equally frequent ones the most recent
        # After "1" 3 of 4 times "2"; after "9 1" always "4": two tokens at 1.0 beat one at 0.75.
        ([9, 1, 4, 4, 1, 2, 8, 1, 2, 7, 1, 2, 9, 1], 5, [4, 4]),
        ([4, 4, 4, 4], 3, [4, 4]),  # "4 4" was followed by another two times, by two others once
        ([1, 2, 3], 4, []),
        ([3], 4, []),
    ],
)
def test_the_likeliest_continuation_is_drafted(text: list[int], count: int, want: list[int]) -> None:
    assert draft(drafter(), text, count) == want


@pytest.mark.parametrize(
    ("text", "want"),
    [([1, 2], []), ([1, 2, 5], [6]), ([1, 2, 5, 6], [7, 8]), ([1, 2, 5, 6, 7, 8], []), ([1, 2, 5, 9], [])],
)
def test_a_prediction_is_drafted_from_to_its_end(text: list[int], want: list[int]) -> None:
    (draft,) = drafter().propose([decoding(text, prediction=[4, 5, 6, 7, 8])], [8])
    assert chains([draft])[0] == want
    assert draft is None or draft.num_predicted == len(want)


@pytest.mark.parametrize(
    ("text", "earlier", "want", "num_predicted"),
    [
        ([1, 2, 3, 9, 1, 2], [], [3, 9], 0),
        ([5, 6, 7, 9, 5, 6], [], [7, 9], 1),
        ([6, 7, 8, 3, 3, 5, 6], [], [7, 8], 2),
        ([1, 2, 3, 5], [2, 3, 5, 6, 9, 9], [6, 9, 9], 0),
    ],
    ids=["of the text", "of both", "a later end", "of an earlier output"],
)
def test_tokens_from_the_prediction_are_counted(
    text: list[int], earlier: list[int], want: list[int], num_predicted: int
) -> None:
    drafting = drafter()
    if earlier:
        keep(drafting, earlier)
    (draft,) = drafting.propose([decoding(text, prediction=[4, 5, 6, 7, 8])], [8])
    assert draft is not None and (draft.token_ids, draft.num_predicted) == (want, num_predicted)
    assert draft.first(1).num_predicted == num_predicted


def test_a_prediction_stays_in_front_of_a_changing_text() -> None:
    drafting, sequence = drafter(), decoding([1], [5, 6], prediction=[*range(4, 90)])
    assert chains(drafting.propose([sequence], [8]))[0] == [7, 8]
    sequence.token_ids[:] = [1, *range(5, 60)]
    assert chains(drafting.propose([sequence], [8]))[0] == [*range(60, 68)]
    sequence.token_ids[:] = [1, 9]
    assert chains(drafting.propose([sequence], [8]))[0] == [10]


@settings(deadline=None, max_examples=100)
@given(
    st.integers(1, 9),
    st.sampled_from([2, 20, 40, 600]),
    st.integers(2, 40),
    st.sampled_from([0.0, 0.5, 1.0, 1.5, 3.0, 1e300]),
    st.sampled_from([0.0, 0.1, 0.5]),
    st.randoms(use_true_random=False),
)
def test_it_equals_the_plain_search(
    alphabet: int, length: int, depth: int, factor: float, prob: float, rng: Any
) -> None:
    """Also where much repeats, and there are more occurrences than are looked at."""
    options = options_of(max_tree_depth=depth, max_spec_factor=factor, min_token_prob=prob)
    drafting = SuffixDrafter(options)
    for size in (length, length // 2, 40):
        keep(drafting, [rng.randrange(alphabet) for _ in range(size)])
    known = corpus(drafting)
    earlier = known._symbols[known._oldest : known._end]
    text = [rng.randrange(alphabet) for _ in range(length)]
    for count in (1, 8, 32):
        want = search(np.array(text, np.int32), count, options, earlier, known.tenant(""))
        assert draft(drafting, text, count) == want


@pytest.mark.parametrize("method", ["ngram", "suffix"])
@pytest.mark.parametrize("is_deployed", [True, False])
def test_requests_are_counted_that_draft_nothing_without_a_compiler(
    method: Method, is_deployed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (ngram, suffix):
        monkeypatch.setattr(module, "compiled", lambda: None)
    write_tiny_llama(tmp_path)
    plain = [ask(name, [1, 2, 5, 1, 2], 8, ignore_eos=True) for name in "ab"]
    asked = [msgspec.structs.replace(each, speculation=RequestSpeculation(method=method)) for each in plain]
    engine = drafting(small_config(tmp_path), method=method if is_deployed else "lookahead")
    assert tokens(run(engine, asked)) == tokens(run(Engine(small_config(tmp_path)), plain))
    counters = engine._speculator.counters()
    assert counters[f'spec_decode_unavailable_total{{method="{method}"}}'] == 2
    assert not any("num_drafts_total" in name for name in counters)


def test_a_request_that_cannot_draft_is_counted_once_whatever_its_plans(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ngram, "compiled", lambda: None)
    write_tiny_llama(tmp_path)
    engine = drafting(small_config(tmp_path), method="ngram")
    engine.add(ask("a", [1, 2, 5, 1, 2], 8, ignore_eos=True))
    for most in (3, 4, 5):
        engine.step()
        engine.replan("a", DraftPlan(method="ngram", max_tokens=most))
    run(engine)
    assert engine._speculator.counters()['spec_decode_unavailable_total{method="ngram"}'] == 1


# --- earlier outputs ---------------------------------------------------------------------------------


def test_tenants_do_not_see_each_others_text() -> None:
    drafting = drafter()
    keep(drafting, [1, 2, 3, 4, 5, 6], salt="one")
    assert draft(drafting, [9, 1, 2, 3], 8, salt="one") == [4, 5, 6]
    for salt in ("", "two", "One"):
        assert draft(drafting, [9, 1, 2, 3], 8, salt=salt) == []
    keep(drafting, [1, 2, 3, 7, 7], salt="two")
    assert draft(drafting, [9, 1, 2, 3], 8, salt="two") == [7, 7]
    assert draft(drafting, [9, 1, 2, 3], 8, salt="one") == [4, 5, 6]
    assert draft(drafting, [9, 1, 2, 3], 8) == []


def test_outputs_are_separate() -> None:
    drafting = drafter()
    keep(drafting, [1, 2, 3])
    keep(drafting, [4, 5, 6])
    assert draft(drafting, [0, 2, 3], 8) == []
    assert draft(drafting, [3, 4], 8) == [5]  # one token matches, not two
    assert draft(drafting, [0, 1, 2], 8) == [3]


def test_prompts_are_not_kept() -> None:
    drafting = drafter()
    drafting.begin(decoding([1, 2, 3, 4], [7, 8, 9]), 0, None)
    drafting.forget("a")
    assert draft(drafting, [0, 1, 2], 8) == []
    assert draft(drafting, [0, 7, 8], 8) == [9]


def test_the_last_committed_tokens_are_kept() -> None:
    drafting, sequence = drafter(), decoding([1, 2, 3], [4, 5])
    drafting.propose([sequence], [3])
    for token in (6, 7):
        sequence.append(token)  # committed by the last step
    drafting.forget("a")
    drafting.forget("a")
    assert len(corpus(drafting)._outputs) == 1
    assert draft(drafting, [0, 4, 5, 6], 8) == [7]


def test_nothing_is_kept_if_configured_so() -> None:
    drafting = drafter(max_cached_requests=0)
    keep(drafting, [1, 2, 3, 4])
    assert drafting._corpus is None
    assert draft(drafting, [0, 1, 2], 8) == []
    assert draft(drafting, [1, 2, 5, 1, 2], 8) == [5, 1]


def test_the_oldest_requests_are_dropped_first() -> None:
    drafting = drafter(max_cached_requests=2)
    for first in (10, 20, 30):
        keep(drafting, [first, first + 1, first + 2])
    assert len(corpus(drafting)._outputs) == 2
    assert draft(drafting, [0, 10], 8) == []
    assert draft(drafting, [0, 20], 8) == [21]
    assert draft(drafting, [0, 30], 8) == [31]


def test_the_ring_is_bounded_and_drops_whole_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suffix, "CAPACITY", 64)
    drafting = drafter()
    arrays = corpus(drafting)._symbols, corpus(drafting)._chains
    assert sum(array.nbytes for array in arrays) == 64 * 40
    for number in range(100):
        keep(drafting, [1000 * number + i for i in range(20)], salt=str(number % 7))  # 21 with its end
        assert len(corpus(drafting)._outputs) == min(3, number + 1)
        assert len(corpus(drafting)._tenants) <= 3
        for known in range(max(0, number - 4), number + 1):
            want = [1000 * known + 5] if known > number - 3 else []
            assert draft(drafting, [0, 1000 * known + 4], 1, salt=str(known % 7)) == want
    assert arrays[0] is corpus(drafting)._symbols and arrays[1] is corpus(drafting)._chains


@pytest.mark.parametrize(("length", "stays"), [(15, True), (16, False)])
def test_an_outputs_end_mark_takes_room_too(
    monkeypatch: pytest.MonkeyPatch, length: int, stays: bool
) -> None:
    monkeypatch.setattr(suffix, "CAPACITY", 64)
    drafting = drafter()
    keep(drafting, list(range(100, 131)))
    keep(drafting, list(range(200, 215)))
    keep(drafting, list(range(300, 300 + length)))
    assert draft(drafting, [0, 110], 1) == ([111] if stays else [])
    assert draft(drafting, [0, 210], 1) == [211]


def test_an_output_longer_than_the_ring_keeps_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suffix, "CAPACITY", 64)
    drafting = drafter()
    keep(drafting, list(range(1, 201)))
    assert draft(drafting, [0, 198, 199], 8) == [200]
    assert draft(drafting, [0, 138], 8) == [139]
    assert draft(drafting, [0, 137], 8) == []


def test_places_may_exceed_32_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suffix, "CAPACITY", 256)
    fresh, late = drafter(), drafter()
    corpus(late)._oldest = corpus(late)._end = 2**32 - 300
    for number in range(60):
        output = [(number * i) % 11 for i in range(3, 20)]
        keep(fresh, output)
        keep(late, output)
        for text in ([number % 11, 3, 6], output[:9], output[:4]):
            assert draft(late, text, 8) == draft(fresh, text, 8)
    assert corpus(late)._oldest > 2**32


def test_each_of_a_batch_has_its_own_draft() -> None:
    drafting = drafter()
    keep(drafting, [1, 2, 3, 4, 5, 6], salt="one")
    sequences = [
        decoding([0, 1, 2, 3], request_id="x", salt="one"),
        decoding([0, 1, 2, 3], request_id="y"),
        decoding([5, 6, 7, 5, 6], request_id="z", salt="one"),
    ]
    assert chains(drafting.propose(sequences, [2, 8, 8])) == [[4, 5], [], [7, 5]]


_ORDERS = (1, 2, 4, 8)
_RECENT = 64


@dataclass(slots=True)
class _Best:
    symbols: list[int] = field(default_factory=list)
    score: float = 0.0


def search(
    text: np.ndarray, count: int, options: SpeculativeConfig, earlier: np.ndarray, tenant: int | None
) -> list[int]:
    """Return at most `count` tokens that may follow `text` (int32 [length]).

    The search covers the text and the tenant's `earlier` outputs (int64 symbols, as in a `Corpus`).
    """
    best = _Best()
    last = text[::-1][: options.suffix_decoding_max_tree_depth - 1].astype(np.int64)
    _improve(best, np.append(text.astype(np.int64), NOTHING), len(text) - 1, last, count, options)
    if tenant is not None:
        _improve(best, earlier, len(earlier), last | tenant << 32, count, options)
    return [symbol & 0xFFFFFFFF for symbol in best.symbols]


def _improve(
    best: _Best,
    symbols: np.ndarray,
    num_places: int,
    last: np.ndarray,
    count: int,
    options: SpeculativeConfig,
) -> None:
    """Try each number of the `last` symbols, the last one first, that occurs in the leading places."""
    for length, places in reversed(list(_occurrences(symbols[:num_places], last))):
        allowed = int(min(count, length * options.suffix_decoding_max_spec_factor))
        limit = min(allowed, options.suffix_decoding_max_tree_depth - length)
        if limit > best.score:
            path, score = _walk(symbols, places, limit, options.suffix_decoding_min_token_prob)
            if score > best.score:
                best.symbols, best.score = path, score


def _occurrences(symbols: np.ndarray, last: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    """Return match lengths, and the places where such a match ends, the most recent first."""
    ends = recent = np.flatnonzero(symbols == last[0])
    for length in range(1, len(last) + 1):
        if length > 1:
            ends, recent = (
                some[symbols[some - (length - 1)] == last[length - 1]]
                for some in (ends[ends >= length - 1], recent[recent >= length - 1])
            )
        if length in _ORDERS:
            recent = ends[-_RECENT:]
        if not len(ends):
            return
        if len(recent):
            yield length, recent[::-1]


def _walk(symbols: np.ndarray, places: np.ndarray, limit: int, min_prob: float) -> tuple[list[int], float]:
    """Return the most frequent continuation, and the sum of its probabilities."""
    path: list[int] = []
    total, alive = 0, places
    while len(path) < limit:
        following = symbols[alive + 1]
        counts = Counter(following[following != NOTHING].tolist())
        symbol, most = counts.most_common(1)[0] if counts else (NOTHING, 0)
        if most == 0 or most / len(places) < min_prob:
            break
        path.append(symbol)
        total += most
        alive = alive[following == symbol] + 1
    return path, total / len(places)
