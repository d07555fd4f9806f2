"""Edits of single logits: biases, allowed tokens, bans, and no end before `min_tokens`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from engine.sampler.batch import BatchParams
from engine.sampler.masks import TokenMasks
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
        for row in batch.forbidding_rows
        for token in forbidden_tokens(rows[row], eos_token_ids)
    ]
    if forbidden:
        flat[torch.tensor(forbidden, device=values.device)] = -torch.inf


def apply_masks(values: Tensor, masks: TokenMasks) -> None:
    """Edit float32 [n, vocab] in place; a token whose bit is not set gets -inf."""
    bits = np.unpackbits(masks.words.view(np.uint8), axis=1, count=values.shape[1], bitorder="little")
    forbidden = torch.from_numpy(bits == 0).to(values.device)
    values[masks.rows] = values[masks.rows].masked_fill_(forbidden, -torch.inf)


def forbidden_tokens(row: SamplingRow, eos_token_ids: Sequence[int]) -> list[int]:
    """The tokens that those before forbid: an end too early, and the end of a banned sequence, which may
    begin in the prompt.
    """
    params, forbidden = row.params, []
    if len(row.output_token_ids) + len(row.drafted) < params.min_tokens:
        forbidden += params.stop_token_ids
        if not params.ignore_eos:
            forbidden += eos_token_ids
    for sequence in params.banned_token_sequences:
        if len(sequence) > 1 and _ends_with(row, sequence[:-1]):
            forbidden.append(sequence[-1])
    return forbidden


def _ends_with(row: SamplingRow, suffix: list[int]) -> bool:
    output = row.history
    if len(output) >= len(suffix):
        return output[-len(suffix) :] == suffix
    from_prompt = len(suffix) - len(output)
    return output == suffix[from_prompt:] and row.prompt_token_ids[-from_prompt:] == suffix[:from_prompt]
