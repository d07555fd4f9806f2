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
from engine.rows import RowArrays, SequenceRows, block_table


class StepInputs:
    """A forward takes either `arrays` or `begin`, whichever it reads."""

    __slots__ = ("_backend", "_batch", "_block_size", "_device")

    def __init__(
        self,
        batch: Sequence[SequenceRows],
        backend: AttentionBackend,
        block_size: int,
        device: torch.device,
    ) -> None:
        self._batch = batch
        self._backend = backend
        self._block_size = block_size
        self._device = device

    @property
    def are_chains(self) -> bool:
        """Whether no rows belong to trees."""
        return all(rows.masks is None for rows in self._batch)

    @property
    def num_rows(self) -> int:
        return sum(len(rows.token_ids) for rows in self._batch)

    def arrays(self) -> RowArrays:
        """Rows of chains, for native code that reads the block tables itself."""
        return RowArrays.of(self._batch)

    def begin(self, padded: int) -> tuple[Tensor, Tensor]:
        """Begin the backend's step. Returns token ids and positions, both [padded]."""
        batch, block_size = self._batch, self._block_size
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
        visible, tree_start = self._trees(positions)
        metadata = AttentionMetadata(
            query_start=self._tensor(query_start),
            context_len=self._tensor(context_len),
            block_table=self._tensor(table),
            slot_mapping=self._tensor(slots),
            max_query_len=longest,
            max_context_len=int(context_len.max(initial=0)),
            visible=visible,
            tree_start=tree_start,
            first_key=self._first_key(),
        )
        self._backend.begin_step(metadata)
        transformers_hook.set_current_backend(self._backend)
        return self._tensor(token_ids), self._tensor(positions)

    def _trees(self, positions: np.ndarray) -> tuple[Tensor | None, Tensor | None]:
        """Masks and first places of trees, if there are any; corrects the positions of their rows."""
        if self.are_chains:
            return None, None
        visible = np.zeros(len(positions), np.uint64)
        tree_start = np.full(len(self._batch), -1, np.int32)
        row = 0
        for index, rows in enumerate(self._batch):
            count = len(rows.token_ids)
            if rows.masks is not None:
                start = rows.start if rows.tree_start is None else rows.tree_start
                tree_start[index] = start
                visible[row : row + count] = rows.masks
                positions[row : row + count] = [start + mask.bit_count() - 1 for mask in rows.masks]
            row += count
        return self._tensor(visible.view(np.int64)), self._tensor(tree_start)

    def _first_key(self) -> Tensor | None:
        if not any(rows.first_key for rows in self._batch):
            return None
        return self._tensor(np.array([rows.first_key for rows in self._batch], np.int32))

    def _tensor(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self._device, non_blocking=True)
