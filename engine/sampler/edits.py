"""What a request asks of single logits: biases, allowed tokens, bans, and no end before `min_tokens`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.sampler.batch import BatchParams
from engine.sampler.rows import SamplingRow


def apply_edits(
    values: Tensor, rows: Sequence[SamplingRow], batch: BatchParams, eos_token_ids: Sequence[int]
) -> None:
    """Edit float32 [n, vocab] in place; a forbidden token gets -inf."""
    flat = values.view(-1)
    if len(batch.biased):
        flat[batch.biased] += batch.bias
    if batch.allowed_rows:
        values[batch.allowed_rows] = values[batch.allowed_rows].masked_fill_(batch.disallowed, -torch.inf)
    if len(batch.banned):
        flat[batch.banned] = -torch.inf
    forbidden = [
        row * batch.vocab_size + token
        for row, token in (
            *_ends_too_early(rows, batch, eos_token_ids),
            *_completed_sequences(rows, batch),
        )
    ]
    if forbidden:
        flat[torch.tensor(forbidden, device=values.device)] = -torch.inf


def _ends_too_early(
    rows: Sequence[SamplingRow], batch: BatchParams, eos_token_ids: Sequence[int]
) -> list[tuple[int, int]]:
    forbidden: list[tuple[int, int]] = []
    for index in batch.min_tokens_rows:
        params = rows[index].params
        if len(rows[index].output_token_ids) < params.min_tokens:
            forbidden.extend((index, token) for token in params.stop_token_ids)
            if not params.ignore_eos:
                forbidden.extend((index, token) for token in eos_token_ids)
    return forbidden


def _completed_sequences(rows: Sequence[SamplingRow], batch: BatchParams) -> list[tuple[int, int]]:
    """(row, token) of every token that would complete a banned sequence, in the prompt begun or not."""
    return [
        (index, sequence[-1])
        for index in batch.banned_sequence_rows
        for sequence in rows[index].params.banned_token_sequences
        if len(sequence) > 1 and _ends_with(rows[index], sequence[:-1])
    ]


def _ends_with(row: SamplingRow, suffix: list[int]) -> bool:
    output = row.output_token_ids
    if len(output) >= len(suffix):
        return output[-len(suffix) :] == suffix
    from_prompt = len(suffix) - len(output)
    return output == suffix[from_prompt:] and row.prompt_token_ids[-from_prompt:] == suffix[:from_prompt]
