"""The rows of one packed forward, decode rows, verify rows and prefill chunks, and its inputs made of them.

The rows of all sequences lie one after another; the attention backend learns from the metadata which rows
belong together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from torch import Tensor

from engine.batch.recurrent_plan import Tables
from engine.copies import Upload
from engine.kv.attention import AttentionMetadata
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


@dataclass(frozen=True)
class StepShape:
    """The least sizes of a step's inputs. Smaller steps get padding, which writes nothing to the pool."""

    rows: int = 0
    logits: int = 0
    sequences: int = 0
    rows_each: int = 0
    """Rows of each sequence."""
    blocks: int = 0
    """Blocks of each sequence; they hold all of its keys, and later blocks are left out."""
    trees: bool = False
    """Whether there are masks, even if all sequences are chains."""
    first_keys: bool = False
    """Whether there are first keys, even if rows see all keys."""
    adapters: bool = False
    """Whether rows may have adapters, even if none has."""
    drafts: bool = False
    """Whether a sequence's only row may be a draft token, which changes no recurrent state."""

    def takes(self, other: StepShape) -> bool:
        """Return whether the steps of `other` fit this shape."""
        sizes = zip(vars(self).values(), vars(other).values(), strict=True)
        return all(own >= least for own, least in sizes)


class StepInputs(NamedTuple):
    token_ids: Tensor
    """int64 [rows], like `positions`."""
    positions: Tensor
    logit_rows: Tensor
    """int64 [logits]: the rows that need logits."""
    attention: AttentionMetadata
    recurrent: Tables[Tensor] | None = None
    adapters: Tensor | None = None
    """int64 [rows]: the address of each row's adapter, 0 for none; None if no row may have an adapter."""
    hidden: Tensor | None = None
    """[rows, hidden_size], for a draft head: the hidden state before each row."""


def are_chains(batch: Sequence[SequenceRows]) -> bool:
    return all(rows.masks is None for rows in batch)


def step_inputs(
    batch: Sequence[SequenceRows],
    logit_rows: Sequence[int],
    upload: Upload,
    table: BlockTable,
    least: StepShape,
    recurrent: Tables[np.ndarray] | None = None,
    adapters: Sequence[int] | None = None,
) -> StepInputs:
    """Make the inputs for the attention that `table` belongs to, on the device of `upload`; they are valid
    until the next upload. `recurrent`: the tables of recurrent layers' operators, if any. `adapters`: the
    addresses of the sequences' adapters, if a row may have one.
    """
    block_size = table.block_size
    rows = RowArrays.of(batch, table)
    counts = rows.spans[1] - rows.spans[0]
    owners = np.repeat(np.arange(len(batch)), counts)
    padded, sequences = max(len(owners), least.rows), max(len(batch), least.sequences)
    query_start = np.full(sequences + 1, len(owners), np.int32)
    query_start[: len(batch)] = counts.cumsum() - counts
    places = np.arange(len(owners)) + (rows.spans[0] - query_start[: len(batch)])[owners]
    token_ids, positions = np.zeros((2, padded), np.int64)
    token_ids[: len(owners)] = rows.token_ids
    positions[: len(owners)] = places
    several = rows.blocks.shape[:-2]
    slots = np.full((*several, padded), -1, np.int64)
    blocks, offsets = np.divmod(places, block_size)
    slots[..., : len(owners)] = rows.blocks[..., owners, blocks].astype(np.int64) * block_size + offsets
    wanted = np.zeros(max(len(logit_rows), least.logits), np.int64)
    wanted[: len(logit_rows)] = logit_rows
    longest = int(rows.spans[1].max(initial=0))
    width = least.blocks or rows.blocks.shape[-1]
    arrays = {
        "query_start": query_start,
        "context_len": _padded(rows.spans[1].astype(np.int32), sequences),
        "block_table": _padded(rows.blocks[..., :width], *several, sequences, width),
        "slot_mapping": slots,
    }
    if least.trees or not are_chains(batch):
        arrays["visible"], arrays["tree_start"] = _trees(batch, positions, sequences)
    if least.first_keys or rows.first_keys is not None:
        first_keys = np.zeros(len(batch), np.int32) if rows.first_keys is None else rows.first_keys
        arrays["first_key"] = _padded(first_keys, sequences)
    listed = [] if recurrent is None else recurrent.arrays
    owned = [] if adapters is None else [_padded(np.array(adapters, np.int64)[owners], padded)]
    uploaded = upload([token_ids, positions, wanted, *arrays.values(), *owned, *listed])
    step_tensors, tables = uploaded[: 3 + len(arrays)], uploaded[3 + len(arrays) :]
    of_rows = None if adapters is None else tables.pop(0)
    metadata = AttentionMetadata(
        **dict(zip(arrays, step_tensors[3:], strict=True)),
        max_query_len=max(int(counts.max(initial=0)), least.rows_each),
        max_context_len=max(longest, least.blocks * block_size),
        query_lens=counts.tolist(),
    )
    of_recurrent = None if recurrent is None else recurrent.on(tables)
    return StepInputs(step_tensors[0], step_tensors[1], step_tensors[2], metadata, of_recurrent, of_rows)


def _padded(array: np.ndarray, *shape: int) -> np.ndarray:
    """Pad an array with zeros to at least this shape."""
    padded = np.zeros([*map(max, array.shape, shape)], array.dtype)
    padded[tuple(map(slice, array.shape))] = array
    return padded


def _trees(
    batch: Sequence[SequenceRows], positions: np.ndarray, sequences: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return the masks and first places of trees, and correct the positions of their rows in place."""
    visible = np.zeros(len(positions), np.uint64)
    tree_start = np.full(sequences, -1, np.int32)
    row = 0
    for index, rows in enumerate(batch):
        count = len(rows.token_ids)
        if rows.masks is not None:
            start = rows.start if rows.tree_start is None else rows.tree_start
            tree_start[index] = start
            visible[row : row + count] = rows.masks
            positions[row : row + count] = [start + mask.bit_count() - 1 for mask in rows.masks]
        row += count
    return visible.view(np.int64), tree_start
