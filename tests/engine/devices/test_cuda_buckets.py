"""The choice of the shape that a step is padded to."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("triton", reason="Triton is for Linux")

from engine.batch.step_inputs import SequenceRows, StepShape
from engine.devices.cuda.buckets import MOST_ROWS, Buckets
from protocol.config import ServeConfig
from protocol.speculation import SpeculativeConfig

BLOCK = 16


def buckets(max_num_seqs: int = 64, max_model_len: int = 5000, **speculation: Any) -> Buckets:
    options = SpeculativeConfig(method="ngram", **speculation) if speculation else None
    config = ServeConfig(max_num_seqs=max_num_seqs, block_size=BLOCK, speculative_config=options)
    return Buckets.of(config, max_model_len)


def step(*counts: int, context: int = 100, masks: bool = False, first_key: int = 0) -> list[SequenceRows]:
    return [
        SequenceRows([1] * n, context - n, [[0]], [1] * n if masks else None, first_key=first_key)
        for n in counts
    ]


def shape(of: Buckets, batch: list[SequenceRows]) -> StepShape | None:
    return of.shape_of(batch, sum(len(rows.token_ids) for rows in batch), BLOCK)


def test_each_shape_takes_the_steps_that_fill_it() -> None:
    for of in (buckets(), buckets(100, 300, num_speculative_tokens=5), buckets(7, 100, tree=True)):
        shapes = list(of)
        assert len(set(shapes)) == len(shapes)
        for each in shapes:
            assert each.rows == each.sequences * each.rows_each <= MOST_ROWS
            filled = step(*[each.rows_each] * each.sequences, context=each.blocks * BLOCK)
            assert shape(of, filled) == each


def test_drafters_have_their_own_buckets() -> None:
    options = SpeculativeConfig(method="ngram", num_speculative_tokens=5)
    config = ServeConfig(max_num_seqs=4, block_size=BLOCK, speculative_config=options)
    of = Buckets.of_drafts(config, 100)
    assert {(each.sequences, each.rows_each) for each in of} == {(s, r) for s in (1, 2, 4) for r in (1, 2)}
    heads = Buckets.of_heads(config, 100)
    assert {each.rows_each for each in heads} == {1, 2, 3, 6}
    assert all(each.first_keys for each in heads)
    expected = StepShape(2, 2, 2, 1, 7, first_keys=True)
    assert shape(heads, step(1, 1)) == shape(heads, step(1, 1, first_key=9)) == expected


def test_steps_with_adapters_have_their_own_shapes() -> None:
    """If rows may have adapters. Otherwise no such shape exists."""
    config = ServeConfig(max_num_seqs=2, block_size=BLOCK)
    plain, of = Buckets.of(config, 100), Buckets.of(config, 100, True)
    assert {*of} == {replace(each, adapters=adapters) for each in plain for adapters in (False, True)}
    assert len([*of]) == len({*of})
    batch = [*step(1), replace(step(1)[0], adapter=3)]
    expected = shape(plain, step(1, 1))
    assert expected is not None and shape(of, step(1, 1)) == expected
    assert shape(of, batch) == replace(expected, adapters=True)
    assert shape(plain, batch) is None


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        (step(1), StepShape(1, 1, 1, 1, 32)),
        (step(1, 1, 1), StepShape(4, 4, 4, 1, 32)),
        (step(*[1] * 17, context=512), StepShape(24, 24, 24, 1, 32)),
        (step(*[1] * 64, context=513), StepShape(64, 64, 64, 1, 64)),
        (step(1, context=5000), StepShape(1, 1, 1, 1, 313)),
        (step(5, 1, 2), StepShape(20, 20, 4, 5, 32)),
        (step(2, 2), StepShape(4, 4, 2, 2, 32)),
    ],
)
def test_a_step_takes_the_smallest_shape_that_fits(batch: list[SequenceRows], expected: StepShape) -> None:
    assert shape(buckets(num_speculative_tokens=4), batch) == expected


@pytest.mark.parametrize(
    "batch",
    [step(6), step(1, 40), step(*[1] * 65), step(1, first_key=1), step(3, masks=True)],
    ids=["more drafted", "a chunk", "more sequences", "a first key", "a tree"],
)
def test_steps_that_fit_no_shape(batch: list[SequenceRows]) -> None:
    assert shape(buckets(num_speculative_tokens=4), batch) is None


def test_steps_with_too_many_rows_fit_no_shape() -> None:
    of = buckets(128, num_speculative_tokens=8)
    assert shape(of, step(*[9] * 48)) is not None
    assert shape(of, step(*[9] * 64)) is None


def test_trees_fit_if_they_are_drafted() -> None:
    of = Buckets([1, 2], [1, 7], [8], trees=True)
    tree = shape(of, step(5, 7, masks=True))
    assert tree == StepShape(14, 14, 2, 7, 8, trees=True)
    assert shape(of, step(5, 7)) == tree
    plain = shape(of, step(1, 1))
    assert plain is not None and not plain.trees
