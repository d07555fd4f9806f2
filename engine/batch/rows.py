"""Rows of a packed forward: one object for each sequence, and arrays that native code reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from engine.kv.state_slots import RowSpan


@dataclass(slots=True, eq=False)
class SequenceRows:
    """Tokens of one sequence to run. The KV of `token_ids[i]` goes to place `start + i` of the sequence's
    blocks; `tables` has the block ids for each block table.

    With `masks` the tokens are rows of a tree that begins at place `tree_start`, by default `start`: see
    `AttentionMetadata.visible`. Rows do not read keys before `first_key`.
    """

    token_ids: Sequence[int]
    start: int
    tables: Sequence[list[int]]
    masks: list[int] | None = None
    tree_start: int | None = None
    first_key: int = 0
    state_slot: int = 0
    """State slot of the sequence, if the model has recurrent layers."""
    certain: int | None = None
    """End of the places whose tokens no later rows replace; None: all. For recurrent layers."""
    adapter: int = 0
    """Slot of the sequence's LoRA adapter; 0: no adapter."""


class BlockTable:
    """The block tables of a batch's sequences as an array. In most steps few sequences have new blocks, so a
    list that equals the previous step's list at its place is not copied again.
    """

    def __init__(self, block_size: int, num_tables: int = 1) -> None:
        self.block_size = block_size
        self._num_tables = num_tables
        self._lists: list[list[int]] = []
        """The lists that the array's rows hold."""
        self._rows = np.zeros((0, 0), np.int32)

    def of(self, batch: Sequence[SequenceRows]) -> np.ndarray:
        """Return int32 [sequences, most blocks], padded with 0; for several tables [tables, sequences, most
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
    the first and the end place of each sequence (the end is exclusive); `blocks` from `BlockTable.of`;
    `first_keys` int32 [sequences], None for zeros.
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
    """Return a sequence's rows in the form that recurrent layers read."""
    count = len(rows.token_ids)
    certain = rows.start + count if rows.certain is None else rows.certain
    tree_start = rows.start if rows.tree_start is None else rows.tree_start
    return RowSpan(rows.state_slot, rows.start, count, certain, rows.masks, tree_start)
