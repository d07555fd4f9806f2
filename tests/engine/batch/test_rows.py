"""Sequences' block lists as an array, of which only changes are read again."""

from __future__ import annotations

import random

import numpy as np

from engine.batch.rows import BlockTable, SequenceRows


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
