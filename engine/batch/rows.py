"""Rows of a packed forward, as sequences of the batch have them, and as native code reads them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from engine.kv.state_slots import RowSpan


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
    state_slot: int = 0
    """The slot of its recurrent layers' state, where the model has some."""
    certain: int | None = None
    """Leading places whose tokens no later rows replace: None for all. Recurrent layers ask for it."""
    adapter: int = 0
    """The slot of its adapter; 0: none."""


class BlockTable:
    """The block tables of a batch's sequences as an array. In most steps few sequences have got other blocks:
    lists that are as they were at their places before are not read again.
    """

    def __init__(self, block_size: int, num_tables: int = 1) -> None:
        self.block_size = block_size
        self._num_tables = num_tables
        self._lists: list[list[int]] = []
        """The lists that lie in the array's rows."""
        self._rows = np.zeros((0, 0), np.int32)

    def of(self, batch: Sequence[SequenceRows]) -> np.ndarray:
        """int32 [sequences, most blocks], padded with 0, or of several tables [tables, sequences, most
        blocks].
        """
        lists = [rows.tables[table] for table in range(self._num_tables) for rows in batch]
        width = max(map(len, lists), default=1)
        self._reserve(len(lists), width)
        for index, (block_ids, before) in enumerate(zip(lists, self._lists, strict=False)):
            if block_ids != before:
                self._lists[index] = [*block_ids]
                self._rows[index, : len(block_ids)] = block_ids
                self._rows[index, len(block_ids) :] = 0
        shape = (len(batch), width) if self._num_tables == 1 else (self._num_tables, len(batch), width)
        return self._rows[: len(lists), :width].copy().reshape(shape)

    def _reserve(self, num_lists: int, width: int) -> None:
        if num_lists > len(self._rows) or width > self._rows.shape[1]:
            self._rows = np.zeros((2 * num_lists, 2 * width), np.int32)
            self._lists = [[] for _ in self._rows]


@dataclass(slots=True, eq=False)
class RowArrays:
    """Rows of chains. `token_ids` int64 [rows], one sequence after the other; `spans` int64 [2, sequences],
    their first places and those after the last; `blocks` as `BlockTable.of` has them; `first_keys` int32
    [sequences], None for zeros.
    """

    token_ids: np.ndarray
    spans: np.ndarray
    blocks: np.ndarray
    first_keys: np.ndarray | None

    @classmethod
    def of(cls, batch: Sequence[SequenceRows], table: BlockTable) -> RowArrays:
        starts = [rows.start for rows in batch]
        ends = [rows.start + len(rows.token_ids) for rows in batch]
        first_keys = [rows.first_key for rows in batch]
        return cls(
            token_ids=np.array([token for rows in batch for token in rows.token_ids], np.int64),
            spans=np.array([starts, ends], np.int64),
            blocks=table.of(batch),
            first_keys=np.array(first_keys, np.int32) if any(first_keys) else None,
        )


def span_of(rows: SequenceRows) -> RowSpan:
    """A sequence's rows as recurrent layers read them."""
    count = len(rows.token_ids)
    certain = rows.start + count if rows.certain is None else rows.certain
    tree_start = rows.start if rows.tree_start is None else rows.tree_start
    return RowSpan(rows.state_slot, rows.start, count, certain, rows.masks, tree_start)
