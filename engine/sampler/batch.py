"""The sampling parameters of a batch as tensors.

`RequestParams` is read once and kept while the same requests run. `BatchParams` maps requests to rows; with
speculation their number changes in each step, so it does little work.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from ctypes import Structure, c_double, c_float, c_int64
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.sampler.rows import edits_logits
from protocol.sampling import SamplingParams

_MIN_TEMPERATURE = 1e-30


class SamplingArgs(Structure):
    """`Sampling` of `chooser.h`, which explains the fields."""

    _fields_ = (
        ("seed", c_int64),
        ("top_k", c_int64),
        ("top_p", c_double),
        ("temperature", c_float),
        ("min_p_floor", c_float),
    )


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
        """The address of the table that the compiled choice reads."""

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
        self.has_min_tokens = min_tokens > 0
        self.penalized = (repetition != 1.0) | (presence != 0.0) | (frequency != 0.0)
        self.penalties = np.stack([repetition, presence, frequency], axis=1).astype(np.float32)

    def _make_table(self) -> np.ndarray:
        table = np.empty(len(self.params), np.dtype(SamplingArgs))
        table["seed"] = self.seeds
        table["top_k"] = self.top_k
        table["top_p"] = self.top_p
        table["temperature"] = np.where(self.greedy, 0.0, self.temperature)
        table["min_p_floor"] = self.min_p_floor
        return table

    def device_rows(self, index: np.ndarray, positions: Sequence[int], seeds: np.ndarray) -> list[np.ndarray]:
        """Return what `read_row` of the Triton kernels reads of each row: int64 and float64 [3, n]."""
        temperature = np.where(self.greedy, 0.0, self.temperature).astype(np.float32)
        floor = self.min_p_floor.astype(np.float32)
        top_p = np.where(self.is_nucleus, self.top_p, 1.0)
        return [
            np.array([seeds, positions, self.top_k[index]]),
            np.array([temperature[index], floor[index], top_p[index]], np.float64),
        ]

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
        self.edits_logits = any(map(edits_logits, params))

    @functools.cached_property
    def disallowed(self) -> Tensor:
        """Bool [restricted requests, vocab]."""
        restricted = np.flatnonzero(self.restricted)
        disallowed = torch.ones(len(restricted), self.vocab_size, dtype=torch.bool)
        for index, request in enumerate(restricted):
            disallowed[index, self.params[request].allowed_token_ids] = False
        return disallowed.to(self.device)


@dataclass(frozen=True, eq=False)
class Distribution:
    """How each of n rows is drawn: [n, 1], but for `seeds` [n], the numbers of the rows with a top-p filter,
    and their `top_p` [rows, 1]. Greedy rows have no filter, and the temperature 1.
    """

    seeds: Tensor
    temperature: Tensor
    has_filters: bool
    min_p_floor: Tensor
    max_top_k: int
    top_k_index: Tensor
    no_top_k: Tensor
    top_p_rows: Tensor
    top_p: Tensor


class BatchParams:
    """The parameters of each row. Row i belongs to request `index[i]` of `requests`.

    Row lists hold the rows that use a feature.
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

    def describes(self, requests: RequestParams, index: list[int]) -> bool:
        """Whether they were built for just these rows."""
        return requests is self._requests and index == self._numbers

    @functools.cached_property
    def distribution(self) -> Distribution:
        requests, index = self._requests, self._index
        top_k = requests.top_k[index]
        top_p_rows = np.flatnonzero(requests.is_nucleus[index])
        has_min_p = bool((requests.min_p_floor > -np.inf).any())
        return Distribution(
            seeds=self._tensor(requests.seeds[index]),
            temperature=self._column(requests.temperature),
            has_filters=has_min_p or bool(top_k.any()) or len(top_p_rows) > 0,
            min_p_floor=self._column(np.where(requests.greedy, -np.inf, requests.min_p_floor)),
            max_top_k=int(top_k.max()),
            top_k_index=self._tensor(np.maximum(top_k - 1, 0)[:, None]),
            no_top_k=self._tensor((top_k == 0)[:, None]),
            top_p_rows=self._tensor(top_p_rows),
            top_p=self._tensor(requests.top_p[index[top_p_rows], None]),
        )

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
        self.forbidding_rows = self._rows(requests.has_min_tokens | requests.has_banned_sequences)
        self.allowed_rows = self._rows(requests.restricted)
        self.biased, self.banned = self._flat(requests.biased), self._flat(requests.banned)
        self.bias = self._tensor(np.concatenate([requests.biases[i] for i in self._numbers]))
        among_restricted = requests.restricted.cumsum() - 1
        self.disallowed = requests.disallowed[self._tensor(among_restricted[index[self.allowed_rows]])]
        self.penalty_factors = self._tensor(requests.penalties[index[self.penalty_rows]].T.copy())


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
