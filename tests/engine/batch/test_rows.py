"""Sequences' block lists as an array, and the inputs of recurrent layers' kernels for a step."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
import torch

from engine.batch.recurrent_plan import DRAFTED, NO_SLOT, Room, padded, tables_of
from engine.batch.step_inputs import BlockTable, SequenceRows
from engine.kv.state_slots import RecurrentLayer, RowSpan, StateLayout


def test_a_table_follows_lists_that_change_in_place() -> None:
    rng, table = random.Random(0), BlockTable(16)
    lists = [[1, 2, 3], [4]]
    seen = []
    for _ in range(60):
        for block_ids in lists:
            match rng.randrange(4):
                case 0:
                    block_ids.append(rng.randrange(100))
                case 1:
                    block_ids[rng.randrange(len(block_ids))] = rng.randrange(100)
                case 2:
                    del block_ids[1:]
        if rng.random() < 0.2:
            lists.insert(rng.randrange(len(lists)), [rng.randrange(100)] * rng.randrange(1, 12))
        elif len(lists) > 1 and rng.random() < 0.2:
            del lists[rng.randrange(len(lists))]
        width = max(map(len, lists))
        expected = [block_ids + [0] * (width - len(block_ids)) for block_ids in lists]
        seen.append((table.of([SequenceRows([0], 0, [block_ids]) for block_ids in lists]), expected))
    for array, expected in seen:  # each caller has its own array
        assert array.dtype == np.int32 and array.tolist() == expected


def test_a_table_that_gets_wider_keeps_unchanged_rows() -> None:
    table, lists = BlockTable(16), [[1, 2], [3]]
    for width in (2, 20):
        lists[1] = [3] * width
        array = table.of([SequenceRows([0], 0, [block_ids]) for block_ids in lists])
        assert array.tolist() == [[1, 2] + [0] * (width - 2), lists[1]]


def test_several_tables_follow_one_another() -> None:
    batch = [SequenceRows([0], 0, [[1, 2], [3]]), SequenceRows([0], 0, [[4], [5, 6, 7]])]
    several = BlockTable(16, num_tables=2).of(batch)
    assert several.tolist() == [[[1, 2, 0], [4, 0, 0]], [[3, 0, 0], [5, 6, 7]]]


LAYOUT = StateLayout((RecurrentLayer(8, 4),), torch.float32).with_drafts(16)


def test_each_sequence_with_drafts_across_a_grid_point_gets_a_state() -> None:
    crossing = [RowSpan(3, 14, 5, 15), RowSpan(5, 15, 3, 16, [1, 3, 7], 15)]
    spans = [crossing[0], RowSpan(4, 20, 5, 21), crossing[1], crossing[0]]
    tables = tables_of(spans, [0, 16, 0, 0], LAYOUT, 3)
    assert tables.num_drafted == 2
    drafted = [bool((tables.tiles[begin:end, 2] & DRAFTED).any()) for begin, end in tables.sequences[:, 5:7]]
    assert drafted == [True, False, False, True]
    assert tables.sequences[[0, 3], 7].tolist() == [0, 1]


def chain(state_slot: int, base: int, count: int) -> RowSpan:
    """Return a chain as far behind its state as a window reaches."""
    start = base + LAYOUT.window
    return RowSpan(state_slot, start, count, start + 1)


def tree(state_slot: int, base: int, count: int) -> RowSpan:
    """Return a tree: a single path, or one node behind another. Each row reads all before it, or its own
    ancestors.
    """
    masks = [(1 << row + 1) - 1 if row % 2 else 1 << row | 1 for row in range(count)]
    start = base + LAYOUT.window
    return RowSpan(state_slot, start, count, start + 1, masks, start)


@pytest.mark.parametrize("count", [1, 2, 5, 16, 17, 40, 64])
@pytest.mark.parametrize("kind", [chain, tree])
def test_no_step_exceeds_the_room_of_its_shape(kind: Callable[[int, int, int], RowSpan], count: int) -> None:
    room = Room.of(LAYOUT, 3, count, trees=kind is tree, drafts=count > 1)
    spans = [kind(state_slot, 16 * state_slot, count) for state_slot in range(3)]
    for batch in (spans, spans[:1]):
        tables = tables_of(batch, [16 * span.state_slot for span in batch], LAYOUT, 3)
        wide = padded(tables, room)
        shapes = [array.shape for array in wide.arrays]
        assert shapes == [(4, 8), (3 * count, 3), (4, 3), (room.tiles, 19)]
        assert wide.num_drafted == (3 if count > 1 else 0)
        for array, part in zip(wide.arrays, tables.arrays, strict=True):
            assert (array[: len(part)] == part).all()
        assert (wide.sequences[len(batch) :, 0] == NO_SLOT).all()
        assert wide.sequences[3, 2:].tolist() == [len(tables.before), 3 * count, 3 * count, 0, 0, 0]


def test_drafts_without_room_are_refused() -> None:
    room = Room.of(LAYOUT, 1, 5, trees=False, drafts=False)
    tables = tables_of([RowSpan(0, 14, 5, 15)], [0], LAYOUT, 3)
    with pytest.raises(AssertionError):
        padded(tables, room)
