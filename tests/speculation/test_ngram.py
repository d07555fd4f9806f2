"""Prompt lookup: hand-checked drafts, the search compared with a naive one, and texts as arrays."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.step.sequence import SequenceState
from protocol.speculation import SpeculativeConfig
from speculation.weightless.ngram import NgramDrafter, Text
from tests.speculation.decoding import chains, decoding


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
def test_it_drafts_what_followed_before(text: list[int], want: list[int]) -> None:
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
def test_it_equals_the_naive_search(texts: list[list[int]], count: int, shortest: int, more: int) -> None:
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
def test_it_holds_all_tokens_after_any_change(pieces: list[list[int]]) -> None:
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
