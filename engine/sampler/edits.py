"""Edits of single tokens' logits: allowed tokens, biases, bans, `min_tokens`, and penalties.

Penalties come from counts that follow each request's output.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engine.sampler.rows import EditLists, RequestParams, SamplingRow, TokenMasks

_FIRST_CAPACITY = 64


class TokenCounts:
    """The distinct tokens of one request, and the count of each in its output (0: only in the prompt)."""

    def __init__(self, prompt_token_ids: Sequence[int]) -> None:
        distinct = list(dict.fromkeys(prompt_token_ids))
        self._index = {token: index for index, token in enumerate(distinct)}
        self._num_prompt = len(distinct)
        self._token_ids = np.array(distinct, dtype=np.int64)
        self._counts = np.zeros(len(distinct), dtype=np.float32)
        self._output: list[int] = []

    def follow(self, output_token_ids: list[int]) -> None:
        """Update the counts to this output: usually a longer one; after rejected drafts, a different one."""
        known = self._output
        common = len(known)
        if output_token_ids[:common] != known:
            common = common_prefix(known, output_token_ids)
        while len(known) > common:
            self._remove(known.pop())
        for token in output_token_ids[common:]:
            self._add(token)
            known.append(token)

    def entries(self) -> tuple[np.ndarray, np.ndarray]:
        """Return token ids (int64) and output counts (float32), views that the next `follow` may change."""
        size = len(self._index)
        return self._token_ids[:size], self._counts[:size]

    def _add(self, token: int) -> None:
        index = self._index.get(token)
        if index is None:
            index = self._index[token] = len(self._index)
            if index == len(self._token_ids):
                capacity = max(_FIRST_CAPACITY, 2 * index)
                self._token_ids = np.resize(self._token_ids, capacity)
                self._counts = np.resize(self._counts, capacity)
            self._token_ids[index] = token
            self._counts[index] = 0.0
        self._counts[index] += 1.0

    def _remove(self, token: int) -> None:
        """Undo the latest `_add`. A token that `_add` made a new entry for is then the last entry."""
        index = self._index[token]
        self._counts[index] -= 1.0
        if self._counts[index] == 0.0 and index >= self._num_prompt:
            del self._index[token]


def common_prefix(one: Sequence[int], other: Sequence[int]) -> int:
    for index, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return index
    return min(len(one), len(other))


class Penalties:
    def __init__(self) -> None:
        self._counts: dict[str, TokenCounts] = {}

    def forget(self, request_id: str) -> None:
        self._counts.pop(request_id, None)

    def entries(self, row: SamplingRow) -> tuple[np.ndarray, np.ndarray]:
        """Return the tokens that the row's penalties apply to (int64) and their counts in the output."""
        counts = self._counts.get(row.request_id)
        if counts is None:
            prompt = row.prompt_token_ids if row.params.repetition_penalty != 1.0 else []
            counts = self._counts[row.request_id] = TokenCounts(prompt)
        counts.follow(row.history)
        token_ids, output_counts = counts.entries()
        return token_ids.copy(), output_counts.copy()


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
        bounds.copy(),
        np.concatenate(tokens) if tokens else np.zeros(0, np.int32),
        np.concatenate(amounts) if amounts else np.zeros(0, np.float32),
        requests.penalties[np.array(index)],
        np.full(len(rows), -1, np.int32) if masks is None else masks.numbers,
        np.zeros((1, 1), np.int32) if masks is None else masks.words,
    )


def forbidden_tokens(row: SamplingRow, eos_token_ids: Sequence[int]) -> list[int]:
    """Return the row's forbidden tokens: end tokens before `min_tokens`, banned tokens, and the last token of
    a banned sequence whose other tokens precede the row. The sequence may begin in the prompt.
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
    """Edit float32 [n, vocab] in place with torch's operators; a forbidden token gets -inf.

    The repetition penalty (Keskar et al. 2019, CTRL) divides positive and multiplies negative values of
    tokens in the prompt or output; frequency subtracts for each occurrence in the output, presence once.
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
