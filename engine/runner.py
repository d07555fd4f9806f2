"""Runs one packed forward: decode rows, verify rows and prefill chunks in a single pass.

The rows of all sequences lie one after another in [1, total_tokens]; the attention backend learns from the
metadata which rows belong together. Logits are computed only for the rows asked for.
"""

from __future__ import annotations

import time

import numpy as np
import torch
from torch import Tensor

from engine.attention import transformers_hook
from engine.attention.interface import AttentionBackend, AttentionMetadata
from engine.forward import Forward
from engine.kv_pool import KVPool
from engine.scheduler import ScheduledStep

WARM_UP_ROWS = 64
"""Unlike the number of logit rows, or torch.compile would take the two sizes for one."""


class Runner:
    def __init__(
        self, forward: Forward, backend: AttentionBackend, pool: KVPool, device: torch.device
    ) -> None:
        self._forward = forward
        self._backend = backend
        self._pool = pool
        self._device = device

    def run(self, step: ScheduledStep, logit_rows: list[int]) -> Tensor:
        """Write the step's KV and return logits [len(logit_rows), vocab_size] of those packed rows."""
        total = step.total_tokens
        rows = self._forward.padded_rows(total)
        token_ids = np.zeros(rows, np.int64)
        positions = np.zeros(rows, np.int64)
        slots = np.full(rows, -1, np.int64)
        query_start = np.zeros(len(step.sequences) + 1, np.int32)
        context_len = np.empty(len(step.sequences), np.int32)
        block_table = self._block_table(step)
        block_size = self._pool.block_size
        row = 0
        for index, (sequence, count) in enumerate(zip(step.sequences, step.num_tokens, strict=True)):
            start = sequence.num_computed
            if count == 1:
                token_ids[row] = sequence.token_ids[start]
                positions[row] = start
                slots[row] = int(block_table[index, start // block_size]) * block_size + start % block_size
            else:
                token_ids[row : row + count] = sequence.token_ids[start : start + count]
                span = np.arange(start, start + count)
                positions[row : row + count] = span
                slots[row : row + count] = (
                    block_table[index, span // block_size].astype(np.int64) * block_size + span % block_size
                )
            row += count
            query_start[index + 1] = row
            context_len[index] = start + count
        metadata = AttentionMetadata(
            query_start=self._tensor(query_start),
            context_len=self._tensor(context_len),
            block_table=self._tensor(block_table),
            slot_mapping=self._tensor(slots),
            max_query_len=max(step.num_tokens),
            max_context_len=int(context_len.max()),
        )
        return self._execute(metadata, self._tensor(token_ids), self._tensor(positions), logit_rows)

    def warm_up(self) -> float:
        """Run padding rows, which compiles the forward if it is to be; returns the seconds it took."""
        start = time.monotonic()
        try:
            self._run_padding(WARM_UP_ROWS)
        except torch._dynamo.exc.TorchDynamoException as error:
            self._forward.give_up_compiling(error)
        return time.monotonic() - start

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
    ) -> Tensor:
        with torch.inference_mode():
            self._backend.begin_step(metadata)
            transformers_hook.set_current_backend(self._backend)
            return self._forward(token_ids, positions, logit_rows)

    def _block_table(self, step: ScheduledStep) -> np.ndarray:
        tables = []
        for sequence in step.sequences:
            assert sequence.table is not None
            tables.append(sequence.table.block_ids)
        table = np.zeros((len(tables), max(map(len, tables))), np.int32)
        for index, block_ids in enumerate(tables):
            table[index, : len(block_ids)] = block_ids
        return table

    def _tensor(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self._device, non_blocking=True)
