"""The inputs of one packed forward: decode rows, verify rows and prefill chunks.

The rows of all sequences lie one after another; the attention backend learns from the metadata which rows
belong together.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from engine.attention import transformers_hook
from engine.attention.interface import AttentionBackend, AttentionMetadata
from engine.rows import SequenceRows, block_table


def num_rows(batch: Sequence[SequenceRows]) -> int:
    return sum(len(rows.token_ids) for rows in batch)


def are_chains(batch: Sequence[SequenceRows]) -> bool:
    """Whether no rows belong to trees."""
    return all(rows.masks is None for rows in batch)


def begin_step(
    batch: Sequence[SequenceRows], backend: AttentionBackend, device: torch.device, padded: int
) -> tuple[Tensor, Tensor]:
    """Begin the backend's step. Returns token ids and positions, both [padded]."""

    def tensor(array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(device, non_blocking=True)

    block_size = backend.block_size
    token_ids = np.zeros(padded, np.int64)
    positions = np.zeros(padded, np.int64)
    slots = np.full(padded, -1, np.int64)
    query_start = np.zeros(len(batch) + 1, np.int32)
    context_len = np.empty(len(batch), np.int32)
    table = block_table([rows.block_ids for rows in batch])
    row = longest = 0
    for index, rows in enumerate(batch):
        start, count = rows.start, len(rows.token_ids)
        if count == 1:
            token_ids[row] = rows.token_ids[0]
            positions[row] = start
            slots[row] = rows.block_ids[start // block_size] * block_size + start % block_size
        else:
            token_ids[row : row + count] = rows.token_ids
            span = np.arange(start, start + count)
            positions[row : row + count] = span
            slots[row : row + count] = (
                table[index, span // block_size].astype(np.int64) * block_size + span % block_size
            )
        row += count
        longest = max(longest, count)
        query_start[index + 1] = row
        context_len[index] = start + count
    visible = tree_start = first_key = None
    if not are_chains(batch):
        visible, tree_start = map(tensor, _trees(batch, positions))
    if any(rows.first_key for rows in batch):
        first_key = tensor(np.array([rows.first_key for rows in batch], np.int32))
    metadata = AttentionMetadata(
        query_start=tensor(query_start),
        context_len=tensor(context_len),
        block_table=tensor(table),
        slot_mapping=tensor(slots),
        max_query_len=longest,
        max_context_len=int(context_len.max(initial=0)),
        visible=visible,
        tree_start=tree_start,
        first_key=first_key,
    )
    backend.begin_step(metadata)
    transformers_hook.set_current_backend(backend)
    return tensor(token_ids), tensor(positions)


def _trees(batch: Sequence[SequenceRows], positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Masks and first places of trees; corrects the positions of their rows."""
    visible = np.zeros(len(positions), np.uint64)
    tree_start = np.full(len(batch), -1, np.int32)
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
