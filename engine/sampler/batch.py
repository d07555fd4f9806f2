"""The sampling parameters of a batch as tensors.

What is read from each request's parameters is kept for as long as the same requests run. How many rows each
of them has differs from step to step where tokens are drafted, so that part of the work is kept small.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from engine.sampler.noise import NOISE_SPAN
from protocol.sampling import SamplingParams

_MIN_TEMPERATURE = 1e-30


class RequestParams:
    """The parameters of requests, in arrays with one entry per request."""

    def __init__(self, params: Sequence[SamplingParams], vocab_size: int, device: torch.device) -> None:
        self.params = list(params)
        self.vocab_size = vocab_size
        self.device = device
        self.greedy = self._flags(lambda p: p.is_greedy)
        self._read_edits()
        self._read_distribution()

    @property
    def only_argmax(self) -> bool:
        """Whether all that is wanted is each row's greatest logit."""
        return bool(self.greedy.all()) and not self.edits_logits

    def describes(self, params: Sequence[SamplingParams]) -> bool:
        """Whether these are the very objects that the arrays were made from."""
        return len(params) == len(self.params) and all(map(operator.is_, params, self.params))

    def _flags(self, holds: Callable[[SamplingParams], bool]) -> np.ndarray:
        return np.array([holds(params) for params in self.params], dtype=bool)

    def _floats(self, value: Callable[[SamplingParams], float]) -> np.ndarray:
        return np.array([value(params) for params in self.params])

    def _read_edits(self) -> None:
        self.penalized = self._flags(_has_penalty)
        self.has_min_tokens = self._flags(lambda p: p.min_tokens > 0)
        self.has_banned_sequences = self._flags(lambda p: any(len(s) > 1 for s in p.banned_token_sequences))
        self.restricted = self._flags(lambda p: p.allowed_token_ids is not None)
        self.biased = [np.fromiter(p.logit_bias, np.int64) for p in self.params]
        self.biases = [np.fromiter(p.logit_bias.values(), np.float32) for p in self.params]
        self.banned = [
            np.array([s[0] for s in p.banned_token_sequences if len(s) == 1], np.int64) for p in self.params
        ]
        self.edits_logits = bool(
            (self.penalized | self.has_min_tokens | self.has_banned_sequences | self.restricted).any()
            or any(map(len, self.biased))
            or any(map(len, self.banned))
        )
        self.penalties = np.array(
            [(p.repetition_penalty, p.presence_penalty, p.frequency_penalty) for p in self.params], np.float32
        )
        restricted = np.flatnonzero(self.restricted)
        disallowed = torch.ones(len(restricted), self.vocab_size, dtype=torch.bool)
        for index, request in enumerate(restricted):
            disallowed[index, self.params[request].allowed_token_ids] = False
        self.disallowed = disallowed.to(self.device)
        """Bool [restricted requests, vocab]."""

    def _read_distribution(self) -> None:
        greedy = self.greedy
        self.seeds = np.array([p.seed for p in self.params], np.int64)
        self.temperature = np.where(greedy, 1.0, self._floats(lambda p: max(p.temperature, _MIN_TEMPERATURE)))
        self.min_p_floor = self._floats(lambda p: math.log(p.min_p) if p.min_p > 0 else -math.inf)
        top_k = self._floats(lambda p: p.top_k).astype(np.int64)
        self.top_k = np.where((top_k > 0) & (top_k < self.vocab_size) & ~greedy, top_k, 0)
        """0 for no filter."""
        self.top_p = self._floats(lambda p: p.top_p)
        self.is_nucleus = (self.top_p < 1.0) & ~greedy
        self.is_open = ~greedy & ~self.is_nucleus & (self.top_k == 0) & (self.min_p_floor == -math.inf)
        """Whether there is no filter."""


class BatchParams:
    """For each row those of its request, whose number in `requests` is `index[row]`.

    Column vectors are [n, 1], one entry per row; row lists name the rows that a feature concerns.
    """

    def __init__(self, requests: RequestParams, index: list[int]) -> None:
        self._requests = requests
        self._numbers = index
        self._index = np.array(index)
        self.vocab_size = requests.vocab_size
        self.edits_logits = requests.edits_logits
        self.greedy_rows = self._rows(requests.greedy)
        self.all_greedy = len(self.greedy_rows) == len(index)
        if self.edits_logits:
            self._build_edits()
        if not self.all_greedy:
            self._build_distribution()

    def describes(self, requests: RequestParams, index: list[int]) -> bool:
        """Whether the tensors were built for just these rows."""
        return requests is self._requests and index == self._numbers

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
        """Open rows have no filter; greedy ones keep their greatest value alone, and get no noise.

        `row_floor` is what a row's tokens must reach whatever the filters: no noise lifts those further down.
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


def _has_penalty(params: SamplingParams) -> bool:
    return (
        params.repetition_penalty != 1.0 or params.presence_penalty != 0.0 or params.frequency_penalty != 0.0
    )
