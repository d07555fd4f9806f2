"""Drafting a chain in one native call: choosing a token, running it and choosing the next never leave C++."""

from __future__ import annotations

from collections.abc import Sequence as Many

import numpy as np
import torch
from torch import Tensor

from engine.attention.cpu_kernel.backend import CpuBackend
from engine.attention.interface import AttentionMetadata
from engine.decoder.forward import NativeDecoder
from engine.runner import block_table
from engine.sampler.rows import edits_logits
from engine.sequence import Sequence
from protocol.speculation import Verification


def draws_natively(sequences: Many[Sequence], verification: Verification) -> bool:
    """Whether `NativeChain` draws as the verification needs it."""
    if any(edits_logits(sequence.params) for sequence in sequences):
        return False
    return verification == "coupled" or all(sequence.params.is_greedy for sequence in sequences)


class NativeChain:
    """Drafts with a decoder whose KV lies in `backend`'s pool, under the sequences' blocks.

    A token is the argmax of logit / temperature plus the noise of its position. Filters (top-k and the like)
    are left to the verification: they seldom change the choice.
    """

    def __init__(self, forward: NativeDecoder, backend: CpuBackend, block_size: int) -> None:
        self._forward = forward
        self._backend = backend
        self._block_size = block_size

    def draft(
        self,
        logits: Tensor,
        sequences: Many[Sequence],
        counts: Many[int],
        first_keys: Many[int] | None = None,
        hidden: Tensor | None = None,
    ) -> list[list[int]]:
        """`logits` [sequences, vocab_size], bfloat16, are those after the last tokens, whose KV is there.

        Keys before a sequence's `first_key` are not looked at. A head also takes the `hidden` states after
        the last tokens, [sequences, hidden_size], and overwrites them.
        """
        tables = [sequence.table.block_ids for sequence in sequences if sequence.table is not None]
        lengths = np.array([len(sequence.token_ids) for sequence in sequences])
        next_slots = self._next_slots(sequences, counts)
        slots = torch.full((len(sequences),), -1, dtype=torch.int64)
        context_len = torch.from_numpy(lengths.astype(np.int32))
        self._backend.begin_step(
            AttentionMetadata(
                query_start=torch.arange(len(sequences) + 1, dtype=torch.int32),
                context_len=context_len,
                block_table=torch.from_numpy(block_table(tables)),
                slot_mapping=slots,
                max_query_len=1,
                max_context_len=int(lengths.max()) + len(next_slots),
                first_key=None if first_keys is None else torch.tensor(first_keys, dtype=torch.int32),
            )
        )
        drafted = self._forward.chain(
            logits,
            last_token=torch.empty(len(sequences), dtype=torch.int64),
            position=torch.from_numpy(lengths - 1),
            context_len=context_len,
            slots=slots,
            next_slots=torch.from_numpy(next_slots),
            seeds=torch.tensor([sequence.params.seed for sequence in sequences]),
            temperatures=torch.tensor([sequence.params.temperature for sequence in sequences]),
            hidden=hidden,
        )
        return [column[:count] for column, count in zip(drafted.T.tolist(), counts, strict=True)]

    def _next_slots(self, sequences: Many[Sequence], counts: Many[int]) -> np.ndarray:
        """int64 [most tokens - 1, sequences]: where the KV of each drafted token but the last goes."""
        size = self._block_size
        slots = np.full((max(counts) - 1, len(sequences)), -1, np.int64)
        for index, (sequence, count) in enumerate(zip(sequences, counts, strict=True)):
            assert sequence.table is not None
            first, block_ids = len(sequence.token_ids), sequence.table.block_ids
            slots[: count - 1, index] = [
                block_ids[place // size] * size + place % size for place in range(first, first + count - 1)
            ]
        return slots
