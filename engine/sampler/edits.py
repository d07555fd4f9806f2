"""Edits of single logits: allowed tokens, biases, bans, no end before `min_tokens`, and penalties."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from engine.sampler.params import RequestParams
from engine.sampler.penalties import Penalties
from engine.sampler.rows import SamplingRow, TokenMasks


class EditLists(NamedTuple):
    """Arrays, or tensors of them on a device. A row has four lists of tokens, one behind the other: those
    allowed, if not all are, those with a bias, the forbidden and the penalized ones.
    """

    bounds: Any
    """int32 [rows, 5]: where the four lists begin, and where the last one ends."""
    tokens: Any
    """int32, of all rows."""
    amounts: Any
    """float32 for each token: its bias, or its count in the output."""
    factors: Any
    """float32 [rows, 3]: repetition, presence and frequency."""
    masked: Any
    """int32 [rows]: which of the `masks` is the row's; -1 for none."""
    masks: Any
    """int32 [masks, words]: the bits of the tokens that grammars allow."""


def edit_lists(
    rows: Sequence[SamplingRow],
    requests: RequestParams,
    index: Sequence[int],
    penalties: Penalties,
    eos_token_ids: Sequence[int],
    masks: TokenMasks | None,
) -> EditLists:
    tokens: list[np.ndarray] = []
    amounts: list[np.ndarray] = []
    ends = [0]

    def add(token_ids: Any, each: Any = None) -> None:
        if len(token_ids):
            tokens.append(np.asarray(token_ids, np.int32))
            amounts.append(np.zeros(len(token_ids), np.float32) if each is None else each)
        ends.append(ends[-1] + len(token_ids))

    for row, request in zip(rows, index, strict=True):
        allowed, biased, biases = requests.listed[request]
        add(allowed)
        add(biased, biases)
        add(forbidden_tokens(row, eos_token_ids))
        add(*(penalties.entries(row) if requests.penalized[request] else ((),)))
    bounds = np.lib.stride_tricks.sliding_window_view(np.array(ends, np.int32), 5)[::4]
    return EditLists(
        np.ascontiguousarray(bounds),
        np.concatenate(tokens) if tokens else np.zeros(0, np.int32),
        np.concatenate(amounts) if amounts else np.zeros(0, np.float32),
        requests.penalties[np.array(index)],
        np.full(len(rows), -1, np.int32) if masks is None else masks.numbers,
        np.zeros((1, 1), np.int32) if masks is None else masks.words,
    )


def forbidden_tokens(row: SamplingRow, eos_token_ids: Sequence[int]) -> list[int]:
    """Return the tokens that may not come: an end too early, a banned token, and the end of a banned
    sequence, which may begin in the prompt.
    """
    params, forbidden = row.params, []
    if len(row.output_token_ids) + len(row.drafted) < params.min_tokens:
        forbidden += params.stop_token_ids
        if not params.ignore_eos:
            forbidden += eos_token_ids
    for sequence in params.banned_token_sequences:
        if len(sequence) == 1 or _ends_with(row, sequence[:-1]):
            forbidden.append(sequence[-1])
    return forbidden


def _ends_with(row: SamplingRow, suffix: list[int]) -> bool:
    output = row.history
    if len(output) >= len(suffix):
        return output[-len(suffix) :] == suffix
    from_prompt = len(suffix) - len(output)
    return output == suffix[from_prompt:] and row.prompt_token_ids[-from_prompt:] == suffix[:from_prompt]


def apply_edits(values: Tensor, edits: EditLists) -> None:
    """Edit float32 [n, vocab] in place by torch's operators; a forbidden token gets -inf.

    Repetition (Keskar et al. 2019, CTRL) divides positive and multiplies negative values of tokens in
    prompt or output; frequency subtracts per occurrence in the output, presence once.
    """
    device = values.device
    tokens = torch.from_numpy(edits.tokens).long().to(device)
    amounts = torch.from_numpy(edits.amounts).to(device)
    for row, (bounds, factors) in enumerate(zip(edits.bounds.tolist(), edits.factors, strict=True)):
        line = values[row]
        allowed, biased, forbidden, penalized = map(slice, bounds[:-1], bounds[1:])
        if bounds[0] < bounds[1]:
            kept = line[tokens[allowed]]
            line.fill_(-torch.inf)
            line[tokens[allowed]] = kept
        line[tokens[biased]] += amounts[biased]
        line[tokens[forbidden]] = -torch.inf
        if bounds[3] < bounds[4]:
            repetition, presence, frequency = torch.from_numpy(factors).to(device)
            old, counts = line[tokens[penalized]], amounts[penalized]
            new = torch.where(old > 0, old / repetition, old * repetition)
            line[tokens[penalized]] = new - (frequency * counts + presence * (counts > 0))
    for row, number in enumerate(edits.masked.tolist()):
        if number >= 0:
            words = edits.masks[number].view(np.uint8)
            bits = np.unpackbits(words, count=values.shape[1], bitorder="little")
            values[row].masked_fill_(torch.from_numpy(bits == 0).to(device), -torch.inf)
