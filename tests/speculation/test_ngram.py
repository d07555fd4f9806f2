"""Prompt lookup: hand-checked drafts, and the compiled and the plain search compared with a naive one."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.step.sequence import SequenceState
from protocol.speculation import SpeculativeConfig
from speculation.weightless import ngram
from speculation.weightless.ngram import NgramDrafter
from tests.speculation.decoding import chains, decoding


@pytest.fixture(params=["compiled", "numpy"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "numpy":
        monkeypatch.setattr(ngram, "compiled", lambda: None)
    else:
        assert ngram.compiled() is not None
    return str(request.param)


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
def test_it_drafts_what_followed_before(way: str, text: list[int], want: list[int]) -> None:
    assert draft(text, 3) == want


def test_drafts_fill_each_sequences_room(way: str) -> None:
    texts = [[1, 2, 3, 4, 5, 6, 1, 2], [1, 2, 3], [1, 2, 3, 4, 5, 6, 1, 2], [7, 7, 7, 7]]
    sequences = [decoding(text, request_id=str(index)) for index, text in enumerate(texts)]
    assert chains(drafter().propose(sequences, [4, 5, 1, 2])) == [[3, 4, 5, 6], [], [3], [7, 7]]


def test_a_growing_request_is_followed(way: str) -> None:
    drafting, sequence = drafter(), decoding([1, 2, 3, 9, 1])
    assert chains(drafting.propose([sequence], [3])) == [[]]
    sequence.append(2)
    assert chains(drafting.propose([sequence], [3])) == [[3, 9, 1]]
    drafting.forget("a")
    assert chains(drafting.propose([decoding([4, 5, 6, 4, 5])], [3])) == [[6, 4, 5]]


def test_it_equals_the_naive_search(way: str) -> None:
    tokens = st.integers(1, 3) | st.integers(1, 40)

    @settings(deadline=None, max_examples=300)
    @given(
        st.lists(st.lists(tokens, min_size=1, max_size=200), min_size=1, max_size=4),
        st.integers(1, 8),
        st.integers(1, 3),
        st.integers(0, 4),
    )
    def check(texts: list[list[int]], count: int, shortest: int, more: int) -> None:
        sequences: list[SequenceState] = [decoding(text, request_id=str(i)) for i, text in enumerate(texts)]
        got = chains(drafter(shortest, shortest + more).propose(sequences, [count] * len(texts)))
        assert got == [naive(text, count, shortest, shortest + more) for text in texts]

    check()
