"""Runs one packed forward: decode rows, verify rows and prefill chunks in a single pass.

The rows of all sequences lie one after another in [1, total_tokens]; the attention backend learns from the
metadata which rows belong together. Logits are computed only for the rows asked for.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from engine.attention import transformers_hook
from engine.attention.interface import AttentionBackend, AttentionMetadata
from engine.decoder.forward import NativeDecoder
from engine.forward import ForwardOutput
from engine.rows import RowArrays, SequenceRows, block_table
from engine.select_forward import PackedForward

WARM_UP_ROWS = 64
"""Unlike the number of logit rows, or torch.compile would take the two sizes for one."""


class Runner:
    """Runs a model over blocks of `block_size` tokens in the pool that `backend` was made for."""

    def __init__(
        self, forward: PackedForward, backend: AttentionBackend, block_size: int, device: torch.device
    ) -> None:
        self._forward = forward
        self._backend = backend
        self._block_size = block_size
        self._device = device

    def run(
        self, batch: Sequence[SequenceRows], logit_rows: list[int], *, wants_hidden: bool = True
    ) -> ForwardOutput:
        """Write the KV of all rows; the logits are those of the packed rows asked for."""
        if isinstance(self._forward, NativeDecoder) and all(rows.masks is None for rows in batch):
            return self._forward.run(RowArrays.of(batch), logit_rows, wants_hidden=wants_hidden)
        total = sum(len(rows.token_ids) for rows in batch)
        padded = self._forward.padded_rows(total)
        token_ids = np.zeros(padded, np.int64)
        positions = np.zeros(padded, np.int64)
        slots = np.full(padded, -1, np.int64)
        query_start = np.zeros(len(batch) + 1, np.int32)
        context_len = np.empty(len(batch), np.int32)
        table = block_table([rows.block_ids for rows in batch])
        block_size = self._block_size
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
        visible, tree_start = self._trees(batch, positions)
        metadata = AttentionMetadata(
            query_start=self._tensor(query_start),
            context_len=self._tensor(context_len),
            block_table=self._tensor(table),
            slot_mapping=self._tensor(slots),
            max_query_len=longest,
            max_context_len=int(context_len.max()),
            visible=visible,
            tree_start=tree_start,
            first_key=self._first_key(batch),
        )
        output = self._execute(metadata, self._tensor(token_ids), self._tensor(positions), logit_rows)
        return output if wants_hidden else ForwardOutput(output.logits, None)

    def _trees(
        self, batch: Sequence[SequenceRows], positions: np.ndarray
    ) -> tuple[Tensor | None, Tensor | None]:
        """Masks and where trees start, if any sequence is one; its rows' positions are then mended."""
        if all(rows.masks is None for rows in batch):
            return None, None
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
        return self._tensor(visible.view(np.int64)), self._tensor(tree_start)

    def _first_key(self, batch: Sequence[SequenceRows]) -> Tensor | None:
        if not any(rows.first_key for rows in batch):
            return None
        return self._tensor(np.array([rows.first_key for rows in batch], np.int32))

    def warm_up(self) -> float:
        """Compile the forward if it is to be; returns the seconds it took."""
        return self._forward.warm_up(lambda: self._run_padding(WARM_UP_ROWS))

    def _run_padding(self, rows: int) -> None:
        metadata = AttentionMetadata(
            query_start=torch.zeros(1, dtype=torch.int32, device=self._device),
            context_len=torch.zeros(0, dtype=torch.int32, device=self._device),
            block_table=torch.zeros((0, 1), dtype=torch.int32, device=self._device),
            slot_mapping=torch.full((rows,), -1, dtype=torch.int64, device=self._device),
            max_query_len=0,
            max_context_len=0,
        )
        zeros = torch.zeros(rows, dtype=torch.int64, device=self._device)
        self._execute(metadata, zeros, zeros, [0, 1])

    def _execute(
        self, metadata: AttentionMetadata, token_ids: Tensor, positions: Tensor, logit_rows: list[int]
    ) -> ForwardOutput:
        with torch.inference_mode():
            self._backend.begin_step(metadata)
            transformers_hook.set_current_backend(self._backend)
            return self._forward(token_ids, positions, logit_rows)

    def _tensor(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self._device, non_blocking=True)
