"""Repetition, presence and frequency penalties, from counts that follow each request's output."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from engine.sampler.rows import SamplingRow

_FIRST_CAPACITY = 64


class TokenCounts:
    """The distinct tokens of one request, and how often each is in its output (0: in the prompt alone)."""

    def __init__(self, prompt_token_ids: Sequence[int]) -> None:
        distinct = list(dict.fromkeys(prompt_token_ids))
        self._index = {token: index for index, token in enumerate(distinct)}
        self._num_prompt = len(distinct)
        self._token_ids = np.array(distinct, dtype=np.int64)
        self._counts = np.zeros(len(distinct), dtype=np.float32)
        self._output: list[int] = []

    def follow(self, output_token_ids: list[int]) -> None:
        """Bring the counts to this output: usually a longer one, after rejected drafts another one."""
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
        """Token ids (int64) and output counts (float32): views that the next `follow` may change."""
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
        """Undo the latest `_add`, so a token that is left with nothing is the last entry."""
        index = self._index[token]
        self._counts[index] -= 1.0
        if self._counts[index] == 0.0 and index >= self._num_prompt:
            del self._index[token]


def common_prefix(one: Sequence[int], other: Sequence[int]) -> int:
    """How many leading tokens are equal."""
    for index, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return index
    return min(len(one), len(other))


class Penalties:
    """Holds the counts of every request that has penalties."""

    def __init__(self) -> None:
        self._counts: dict[str, TokenCounts] = {}

    def forget(self, request_id: str) -> None:
        self._counts.pop(request_id, None)

    def entries(self, row: SamplingRow) -> tuple[np.ndarray, np.ndarray]:
        """Return the tokens that the row's penalties concern (int64) and their counts in the output."""
        counts = self._counts.get(row.request_id)
        if counts is None:
            prompt = row.prompt_token_ids if row.params.repetition_penalty != 1.0 else []
            counts = self._counts[row.request_id] = TokenCounts(prompt)
        counts.follow(row.history)
        token_ids, output_counts = counts.entries()
        return token_ids.copy(), output_counts.copy()
