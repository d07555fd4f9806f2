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
from engine.rows import RowArrays, SequenceRows


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

    rows, size = RowArrays.of(batch, backend.arena), backend.block_size
    counts = rows.spans[1] - rows.spans[0]
    query_start = np.zeros(len(batch) + 1, np.int32)
    query_start[1:] = np.cumsum(counts)
    owners = np.repeat(np.arange(len(batch)), counts)
    places = np.arange(len(owners)) + (rows.spans[0] - query_start[:-1])[owners]
    token_ids, positions = np.zeros((2, padded), np.int64)
    token_ids[: len(owners)] = rows.token_ids
    positions[: len(owners)] = places
    slots = np.full(padded, -1, np.int64)
    slots[: len(owners)] = rows.blocks[owners, places // size].astype(np.int64) * size + places % size
    visible = tree_start = None
    if not are_chains(batch):
        visible, tree_start = map(tensor, _trees(batch, positions))
    metadata = AttentionMetadata(
        query_start=tensor(query_start),
        context_len=tensor(rows.spans[1].astype(np.int32)),
        block_table=tensor(rows.blocks),
        slot_mapping=tensor(slots),
        max_query_len=int(counts.max(initial=0)),
        max_context_len=int(rows.spans[1].max(initial=0)),
        visible=visible,
        tree_start=tree_start,
        first_key=None if rows.first_keys is None else tensor(rows.first_keys),
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
