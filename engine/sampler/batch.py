"""The sampling parameters of a batch as tensors.

`RequestParams` is read once and kept while the same requests run. `BatchParams` maps requests to rows; with
speculation their number changes in each step, so it does little work.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from engine.sampler.noise import NOISE_SPAN
from engine.sampler.structs import Request
from protocol.sampling import SamplingParams

_MIN_TEMPERATURE = 1e-30


class RequestParams:
    """The parameters of requests, in arrays with one entry per request."""

    def __init__(self, params: Sequence[SamplingParams], vocab_size: int, device: torch.device) -> None:
        self.params = list(params)
        self.vocab_size = vocab_size
        self.device = device
        self.seeds = np.array([p.seed for p in params], np.int64)
        self._read_numbers(np.array([_numbers(p) for p in params]).T)
        self._read_token_ids()
        self._table = self._make_table()
        self.table_address: int = self._table.ctypes.data
        """Of what the compiled choice reads of each request."""

    @property
    def only_argmax(self) -> bool:
        """Whether all that is wanted is each row's greatest logit."""
        return bool(self.greedy.all()) and not self.edits_logits

    def describes(self, params: Sequence[SamplingParams]) -> bool:
        """Whether these are the very objects that the arrays were made from."""
        return len(params) == len(self.params) and all(map(operator.is_, params, self.params))

    def _read_numbers(self, columns: np.ndarray) -> None:
        temperature, top_k, self.top_p, min_p, repetition, presence, frequency, min_tokens = columns
        self.greedy = temperature == 0
        self.temperature = np.where(self.greedy, 1.0, np.maximum(temperature, _MIN_TEMPERATURE))
        self.min_p_floor = np.log(min_p, where=min_p > 0, out=np.full_like(min_p, -np.inf))
        limits = (top_k > 0) & (top_k < self.vocab_size) & ~self.greedy
        self.top_k = np.where(limits, top_k, 0).astype(np.int64)
        """0 for no filter."""
        self.is_nucleus = (self.top_p < 1.0) & ~self.greedy
        self.is_open = ~(self.greedy | limits | self.is_nucleus | (min_p > 0))
        """Whether there is no filter."""
        self.has_min_tokens = min_tokens > 0
        self.penalized = (repetition != 1.0) | (presence != 0.0) | (frequency != 0.0)
        self.penalties = np.stack([repetition, presence, frequency], axis=1).astype(np.float32)

    def _make_table(self) -> np.ndarray:
        table = np.empty(len(self.params), np.dtype(Request))
        table["seed"] = self.seeds
        table["top_k"] = self.top_k
        table["top_p"] = self.top_p
        table["temperature"] = np.where(self.greedy, 0.0, self.temperature)
        table["min_p_floor"] = self.min_p_floor
        return table

    def _read_token_ids(self) -> None:
        """Biased, banned and allowed tokens; single ones are arrays, empty where there are none."""
        params = self.params
        self.biased = [np.fromiter(p.logit_bias, np.int64) for p in params]
        self.biases = [np.fromiter(p.logit_bias.values(), np.float32) for p in params]
        singles = [[s[0] for s in p.banned_token_sequences if len(s) == 1] for p in params]
        self.banned = [np.array(tokens, np.int64) for tokens in singles]
        self.has_banned_sequences = np.array(
            [len(p.banned_token_sequences) > len(tokens) for p, tokens in zip(params, singles, strict=True)]
        )
        self.restricted = np.array([p.allowed_token_ids is not None for p in params])
        restricted = np.flatnonzero(self.restricted)
        disallowed = torch.ones(len(restricted), self.vocab_size, dtype=torch.bool)
        for index, request in enumerate(restricted):
            disallowed[index, params[request].allowed_token_ids] = False
        self.disallowed = disallowed.to(self.device)
        """Bool [restricted requests, vocab]."""
        of_batch = self.penalized | self.has_min_tokens | self.has_banned_sequences | self.restricted
        self.edits_logits = bool(of_batch.any()) or any(
            p.logit_bias or p.banned_token_sequences for p in params
        )


class BatchParams:
    """The parameters of each row. Row i belongs to request `index[i]` of `requests`.

    Column vectors are [n, 1], one entry per row. Row lists hold the rows that use a feature. With
    `only_edits` temperatures and filters are left out.
    """

    def __init__(self, requests: RequestParams, index: list[int], *, only_edits: bool = False) -> None:
        self._requests = requests
        self._numbers = index
        self._only_edits = only_edits
        self._index = np.array(index)
        self.vocab_size = requests.vocab_size
        self.edits_logits = requests.edits_logits
        self.greedy_rows = self._rows(requests.greedy)
        self.all_greedy = len(self.greedy_rows) == len(index)
        if self.edits_logits:
            self._build_edits()
        if not (self.all_greedy or only_edits):
            self._build_distribution()

    def describes(self, requests: RequestParams, index: list[int], *, only_edits: bool) -> bool:
        """Whether the tensors were built for just these rows, and all that are wanted."""
        enough = only_edits or not self._only_edits
        return enough and requests is self._requests and index == self._numbers

    def _rows(self, flags: np.ndarray) -> list[int]:
        return np.flatnonzero(flags[self._index]).tolist()

    def _tensor(self, values: np.ndarray) -> Tensor:
        return torch.from_numpy(values).to(self._requests.device)

    def _column(self, values: np.ndarray) -> Tensor:
        return self._tensor(values.astype(np.float32)[self._index, None])

    def _flat(self, token_ids: list[np.ndarray]) -> Tensor:
        """Flat indices into [n, vocab] of each row's tokens, given those of each request."""
        rows = enumerate(self._numbers)
        return self._tensor(np.concatenate([row * self.vocab_size + token_ids[i] for row, i in rows]))

    def _build_edits(self) -> None:
        requests, index = self._requests, self._index
        self.penalty_rows = self._rows(requests.penalized)
        self.min_tokens_rows = self._rows(requests.has_min_tokens)
        self.banned_sequence_rows = self._rows(requests.has_banned_sequences)
        self.allowed_rows = self._rows(requests.restricted)
        self.biased, self.banned = self._flat(requests.biased), self._flat(requests.banned)
        self.bias = self._tensor(np.concatenate([requests.biases[i] for i in self._numbers]))
        among_restricted = requests.restricted.cumsum() - 1
        self.disallowed = requests.disallowed[self._tensor(among_restricted[index[self.allowed_rows]])]
        self.penalty_factors = self._tensor(requests.penalties[index[self.penalty_rows]].T.copy())

    def _build_distribution(self) -> None:
        """Open rows have no filter. Greedy rows keep only their greatest value and get no noise.

        `row_floor` is the least value that noise can lift to the top, whatever the filters.
        """
        requests, index = self._requests, self._index
        self.seeds = self._tensor(requests.seeds[index])
        self.temperature = self._column(requests.temperature)
        self.noise_scale = self._column(~requests.greedy).squeeze(1)
        self.min_p_floor = self._column(requests.min_p_floor)

        top_k = requests.top_k[index]
        self.max_top_k = int(top_k.max())
        self.top_k_index = self._tensor(np.maximum(top_k - 1, 0)[:, None])
        self.no_top_k = self._tensor((top_k == 0)[:, None])
        self.has_value_filter = self.max_top_k > 0 or bool((requests.min_p_floor > -math.inf).any())

        top_p_rows = np.flatnonzero(requests.is_nucleus[index])
        self.top_p_rows = self._tensor(top_p_rows)
        self.top_p = self._tensor(requests.top_p[index[top_p_rows], None])
        self.top_k_in_top_p_rows = bool(top_k[top_p_rows].all())

        open_rows = np.flatnonzero(requests.is_open[index])
        self.open_rows = self._tensor(open_rows)
        self.all_open = len(open_rows) == len(index)
        floor = np.where(requests.greedy, 0.0, np.where(requests.is_open, math.inf, -NOISE_SPAN))
        self.row_floor = self._column(floor)


def _numbers(params: SamplingParams) -> tuple[float, ...]:
    return (
        params.temperature,
        params.top_k,
        params.top_p,
        params.min_p,
        params.repetition_penalty,
        params.presence_penalty,
        params.frequency_penalty,
        params.min_tokens,
    )
