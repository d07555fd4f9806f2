"""Requests' sampling parameters, in arrays."""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from ctypes import Structure, c_double, c_float, c_int64

import numpy as np

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
    """The parameters of requests, in arrays with one entry per request. They are read once and kept while the
    same requests run.
    """

    def __init__(self, params: Sequence[SamplingParams], vocab_size: int) -> None:
        self.params = list(params)
        self.seeds = np.array([p.seed for p in params], np.int64)
        temperature, top_k, self.top_p, min_p, repetition, presence, frequency = np.array(
            [_numbers(p) for p in params]
        ).T
        self.greedy = temperature == 0
        self.temperature = np.where(self.greedy, 1.0, np.maximum(temperature, _MIN_TEMPERATURE))
        self.min_p_floor = np.log(min_p, where=min_p > 0, out=np.full_like(min_p, -np.inf))
        limits = (top_k > 0) & (top_k < vocab_size) & ~self.greedy
        self.top_k = np.where(limits, top_k, 0).astype(np.int64)
        """0 for no filter."""
        self.is_nucleus = (self.top_p < 1.0) & ~self.greedy
        self.penalized = (repetition != 1.0) | (presence != 0.0) | (frequency != 0.0)
        self.penalties = np.stack([repetition, presence, frequency], axis=1).astype(np.float32)
        self.edits_logits = any(map(edits_logits, params))
        self._table = self._make_table()
        self.table_address: int = self._table.ctypes.data
        """The address of the table that the compiled choice reads."""

    @functools.cached_property
    def listed(self) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """Each request's allowed tokens, if not all are, and its biased tokens with their biases."""
        return [
            (
                np.array(p.allowed_token_ids or (), np.int32),
                np.fromiter(p.logit_bias, np.int32),
                np.fromiter(p.logit_bias.values(), np.float32),
            )
            for p in self.params
        ]

    def describes(self, params: Sequence[SamplingParams]) -> bool:
        """Whether these are the very objects that the arrays were made from."""
        return len(params) == len(self.params) and all(map(operator.is_, params, self.params))

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


def _numbers(params: SamplingParams) -> tuple[float, ...]:
    return (
        params.temperature,
        params.top_k,
        params.top_p,
        params.min_p,
        params.repetition_penalty,
        params.presence_penalty,
        params.frequency_penalty,
    )
