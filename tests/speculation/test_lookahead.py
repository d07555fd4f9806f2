"""Lookahead decoding: the window, the remembered n-grams, and the contents of drafts."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.step.draft import Draft
from engine.step.sequence import SequenceState
from protocol.config import ServeConfig
from protocol.speculation import MAX_TREE_NODES, SpeculativeConfig
from speculation.drafter import ComputedRows
from speculation.verification.verify import agreeing_path
from speculation.weightless import lookahead
from speculation.weightless.lookahead import (
    LookaheadDrafter,
    LookaheadWindow,
    NgramPool,
    ngrams_of,
    tree,
    window_masks,
)
from tests.speculation.decoding import decoding

EOS = 0
Model = Callable[[list[int]], int]
"""Returns the likeliest token after a context."""


def options(ngram: int = 4, window: int = 5, guesses: int = 5) -> SpeculativeConfig:
    return SpeculativeConfig(
        method="lookahead", lookahead_ngram=ngram, lookahead_window=window, lookahead_guesses=guesses
    )


def drafter_of(asked: SpeculativeConfig) -> LookaheadDrafter:
    target: Any = SimpleNamespace(eos_token_ids=[EOS])
    return LookaheadDrafter(asked, ServeConfig(model=""), target)


def drafter(**sizes: int) -> LookaheadDrafter:
    return drafter_of(options(**sizes))


def step(drafting: LookaheadDrafter, sequence: SequenceState, model: Model, num_rows: int) -> Draft | None:
    """Run one step like the engine, with a model that sees what the masks show."""
    draft = drafting.propose([sequence], [num_rows])[0]
    start = len(sequence.token_ids) - 1
    rows = [sequence.token_ids[-1], *(draft.token_ids if draft is not None else [])]
    masks = draft.masks() if draft is not None else [1]
    assert masks is not None
    seen = [[rows[i] for i in range(len(rows)) if mask >> i & 1] for mask in masks]
    tokens = [model(sequence.token_ids[:-1] + context) for context in seen]
    accepted = agreeing_path(draft, tokens) if draft is not None else []
    for row in [0, *(node + 1 for node in accepted)]:
        sequence.append(tokens[row])
    probed = tokens[1 + draft.num_nodes :] if draft is not None else []
    computed = ComputedRows(sequence, start, 1 + len(accepted), None, draft, accepted, probed)
    drafting.observe([computed])
    return draft


def run(drafting: LookaheadDrafter, model: Model, num_tokens: int, num_rows: int = 63) -> float:
    """Return the tokens per step, after checking that they are the model's own."""
    sequence = decoding([1, 2, 3], [4])
    num_steps = 0
    while len(sequence.output_token_ids) < num_tokens:
        step(drafting, sequence, model, num_rows)
        num_steps += 1
    want = [1, 2, 3, 4]
    while len(want) < len(sequence.token_ids):
        want.append(model(want))
    assert sequence.token_ids == want
    return len(sequence.output_token_ids) / num_steps


def never_repeating(context: list[int]) -> int:
    """A model whose tokens depend on the position alone and are all different."""
    return 5 + len(context) * 5 % 10_007


# --- the window --------------------------------------------------------------------------------------


def test_the_window_rows_masks() -> None:
    # Probes: 0 1 are columns 1 2 of level 0, 2 3 4 level 1, 5 6 7 level 2.
    seen = [[0], [0, 1], [2], [0, 3], [0, 1, 4], [2, 5], [0, 3, 6], [0, 1, 4, 7]]
    assert window_masks(3, 3) == [sum(1 << probe for probe in row) for row in seen]
    assert window_masks(1, 1) == []


@pytest.mark.parametrize(("levels", "columns"), [(1, 4), (2, 1), (3, 5), (7, 4)])
def test_a_rows_position_counts_the_rows_that_it_sees(levels: int, columns: int) -> None:
    """Its position is the last token's, and one more for each row that it sees and itself."""
    places = [column + level for level in range(levels) for column in range(columns)][1:]
    masks = window_masks(levels, columns)
    assert [mask.bit_count() for mask in masks] == places
    assert [mask.bit_length() for mask in masks] == list(range(1, levels * columns))


def test_a_window_moves_and_yields_ngrams() -> None:
    window = LookaheadWindow(np.arange(10, 22, dtype=np.int32), 3, 3, [EOS])
    assert window.probes() == [14, 18, 11, 15, 19, 12, 16, 20]  # pieces of the text, column by column
    ngrams = window.advance(99, [51, 52, 53])
    assert ngrams == [(99, (11, 12, 51)), (14, (15, 16, 52)), (18, (19, 20, 53))]
    assert window.probes() == [15, 19, 12, 16, 20, 51, 52, 53]
    assert window.advance(98, [61, EOS, 63])[1] == (15, (16, 52, EOS))
    assert window.probes() == [16, 20, 51, 52, 53, 61, 15, 63]  # nothing follows the end of text


def test_a_short_text_fills_a_window() -> None:
    probes = LookaheadWindow(np.array([7, 8], np.int32), 3, 4, [EOS]).probes()
    assert probes == [8, 7, 8, 8, 7, 8, 7, 7, 8, 7, 8]


@pytest.mark.parametrize(("ngram", "window", "least"), [(2, 4, 1.4), (3, 5, 1.7), (4, 5, 1.9), (5, 6, 2.0)])
def test_the_window_finds_ngrams_that_the_text_lacks(ngram: int, window: int, least: float) -> None:
    assert run(drafter(ngram=ngram, window=window), never_repeating, 200) >= least


def test_each_row_is_computed_from_the_rows_that_it_should_see() -> None:
    """A model that looks far back gives other tokens if a mask is wrong by one row."""

    def model(context: list[int]) -> int:
        return 1 + (sum((i + 2) * token for i, token in enumerate(context[-7:])) + len(context)) % 13

    assert run(drafter(), model, 300) >= 1.0


# --- drafts ------------------------------------------------------------------------------------------


def test_ngrams_with_common_beginnings_become_a_tree() -> None:
    assert tree([(1, 2, 3), (1, 2, 4), (5, 2), (1, 2)], 9) == ([1, 2, 3, 4, 5, 2], [-1, 0, 1, 1, -1, 4])
    assert tree([(1, 2, 3), (1, 2, 4), (5, 2)], 4) == ([1, 2, 3, 4], [-1, 0, 1, 1])
    assert tree([], 4) == ([], [])


def test_ngrams_of_the_text_are_the_most_recent_ones() -> None:
    text = np.array([1, 2, 3, 4, 1, 5, 6, 1], np.int32)
    assert list(ngrams_of(text, 3)) == [(5, 6, 1), (2, 3, 4)]
    many = np.array([1, 2] * 200 + [1], np.int32)
    assert len(list(ngrams_of(many, 3))) == 64


def test_ngrams_of_window_and_text_alternate() -> None:
    drafting = drafter(guesses=3)
    sequence = decoding([1, 20, 21, 22, 1, 30, 31, 32], [1])
    drafting.propose([sequence], [0])
    for last in (40, 50):
        drafting._pools["a"].add(1, (last, last + 1, last + 2))
    draft = drafting.propose([sequence], [63])[0]
    assert draft is not None
    assert draft.token_ids[: draft.num_nodes] == [50, 51, 52, 30, 31, 32, 40, 41, 42]


def test_the_pool_keeps_the_latest_ngrams() -> None:
    pool = NgramPool(2)
    for ngram in [(1, 1), (2, 2), (1, 1), (3, 3)]:
        pool.add(7, ngram)
    pool.add(8, (4, 4))
    assert list(pool.starting_with(7)) == [(3, 3), (1, 1)]
    assert list(pool.starting_with(8)) == [(4, 4)]
    assert list(pool.starting_with(9)) == []


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookahead, "_MAX_KEYS", 50)
    drafting = drafter()
    run(drafting, never_repeating, 400)
    assert len(drafting._pools["a"]._ngrams) == 50
    drafting.forget("a")
    drafting.forget("a")
    assert not drafting._pools and not drafting._windows and not drafting._texts


@pytest.mark.parametrize("num_rows", [0, 1, 2, 8, 13, 14, 20, 63])
def test_too_little_room_only_costs_speed(num_rows: int) -> None:
    assert run(drafter(), lambda context: 1 + context[-1] % 6, 60, num_rows) >= 1.0


@settings(deadline=None, max_examples=200)
@given(
    st.lists(st.integers(0, 4), min_size=1, max_size=30),
    st.integers(2, 8),
    st.integers(1, 16),
    st.integers(1, 16),
    st.integers(0, 63),
    st.randoms(use_true_random=False),
)
def test_drafts_are_valid(
    text: list[int], ngram: int, window: int, guesses: int, num_rows: int, rng: Any
) -> None:
    sizes = options(ngram, window, guesses)
    if sizes.lookahead_rows > MAX_TREE_NODES:
        return
    drafting, sequence = drafter_of(sizes), decoding(text, [1])
    for _ in range(6):
        draft = step(drafting, sequence, lambda context: rng.randrange(5), num_rows)
        if draft is None:
            continue
        assert 0 < len(draft.token_ids) <= min(num_rows, sizes.lookahead_rows)
        assert draft.parents is not None and len(draft.parents) == draft.num_nodes
        assert all(-1 <= parent < node for node, parent in enumerate(draft.parents))
        assert len(set(zip(draft.parents, draft.token_ids, strict=False))) == draft.num_nodes
        assert len(draft.probes) in (0, window * (ngram - 1) - 1)
        masks = draft.masks()
        assert masks is not None
        for row, mask in enumerate(masks):
            assert mask & 1 and mask.bit_length() == row + 1
            seen = [other for other in range(row) if mask >> other & 1]
            # a path: rows on it see only their ancestors
            assert all(masks[other] & ~mask == 0 for other in seen)
        probes_see = [mask >> 1 & ((1 << draft.num_nodes) - 1) for mask in draft.probes]
        assert not any(probes_see)
