"""Requests' tokens as arrays: new tokens are appended, and changed ones are read again."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from protocol.speculation import SpeculativeConfig
from speculation.weightless.ngram import NgramDrafter, Text
from tests.speculation.decoding import decoding


class CountingTokens(list[int]):
    """Counts the tokens that slices return."""

    num_read = 0

    def __getitem__(self, index):  # type: ignore[no-untyped-def]
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
        def tokens(self, *args: object, **fields: object) -> list[int]:
            return self._updated(decoding(*args, **fields)).tokens.tolist()  # type: ignore[arg-type]

    drafter = Drafter(SpeculativeConfig(method="ngram"))
    assert drafter.tokens([1, 2, 3, 4], request_id="a") == [1, 2, 3, 4]
    assert drafter.tokens([1, 2, 9, 4, 5], request_id="a") == [1, 2, 9, 4, 5]
    assert drafter.tokens([8], request_id="b") == [8]
    drafter.forget("a")
    drafter.forget("never seen")
    assert drafter.tokens([8, 8], request_id="a") == [8, 8]
