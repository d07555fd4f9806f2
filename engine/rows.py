"""Rows of a packed forward, as sequences of the batch have them, and as native code reads them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from engine.recurrent.seats import RowSpan


@dataclass(slots=True, eq=False)
class SequenceRows:
    """Tokens of one sequence to run: the KV of `token_ids[i]` goes to place `start + i` of its blocks, of
    which it has a list in each block table.

    With `masks` they are rows of a tree, which begins at place `tree_start`, by default `start`: see
    `AttentionMetadata.visible`. Keys before `first_key` are not looked at.
    """

    token_ids: Sequence[int]
    start: int
    tables: Sequence[list[int]]
    masks: list[int] | None = None
    tree_start: int | None = None
    first_key: int = 0
    seat: int = 0
    """Of the state of recurrent layers, where the model has some."""
    certain: int | None = None
    """Leading places whose tokens no later rows replace: None for all. Recurrent layers ask for it."""
    adapter: int = 0
    """The slot of its adapter; 0: none."""


@dataclass(slots=True, eq=False)
class RowArrays:
    """Rows of chains. `token_ids` int64 [rows], one sequence after the other; `spans` int64 [2, sequences],
    their first places and those after the last; `blocks` int32 [sequences, most blocks], those of one arena,
    or of several tables [tables, sequences, most blocks]; `first_keys` int32 [sequences], None for zeros.
    """

    token_ids: np.ndarray
    spans: np.ndarray
    blocks: np.ndarray
    first_keys: np.ndarray | None

    @classmethod
    def of(cls, batch: Sequence[SequenceRows], arena: int, num_tables: int = 1) -> RowArrays:
        starts = [rows.start for rows in batch]
        ends = [rows.start + len(rows.token_ids) for rows in batch]
        first_keys = [rows.first_key for rows in batch]
        return cls(
            token_ids=np.array([token for rows in batch for token in rows.token_ids], np.int64),
            spans=np.array([starts, ends], np.int64),
            blocks=block_table([rows.tables[arena] for rows in batch])
            if num_tables == 1
            else _block_tables(batch, num_tables),
            first_keys=np.array(first_keys, np.int32) if any(first_keys) else None,
        )


def _block_tables(batch: Sequence[SequenceRows], num_tables: int) -> np.ndarray:
    tables = [rows.tables[table] for table in range(num_tables) for rows in batch]
    table = block_table(tables)
    return table.reshape(num_tables, len(batch), table.shape[1])


def block_table(tables: Sequence[list[int]]) -> np.ndarray:
    """int32 [tables, most blocks], padded with 0."""
    if len(tables) == 1:
        return np.array(tables, np.int32)
    padded = np.zeros((len(tables), max(map(len, tables), default=1)), np.int32)
    for row, block_ids in zip(padded, tables, strict=True):
        row[: len(block_ids)] = block_ids
    return padded


def span_of(rows: SequenceRows) -> RowSpan:
    """What recurrent layers are told of a sequence's rows."""
    count = len(rows.token_ids)
    certain = rows.start + count if rows.certain is None else rows.certain
    tree_start = rows.start if rows.tree_start is None else rows.tree_start
    return RowSpan(rows.seat, rows.start, count, certain, rows.masks, tree_start)
