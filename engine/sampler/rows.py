"""The rows that the sampler reads, the parameters of their requests, the masks of grammars, and the interface
of a sampler for one kind of device.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Sequence
from ctypes import Structure
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from torch import Tensor

from native.structs import fields
from protocol.sampling import SamplingParams


@dataclass(slots=True, eq=False)
class SamplingRow:
    """One token to choose; `position` is its absolute position in prompt + output.

    Several rows may belong to one request. Each has the `drafted` tokens between the output and its own
    token, or fewer if the request does not need them (`needs_history`). The output is the request's own list,
    which only grows.
    """

    params: SamplingParams
    prompt_token_ids: list[int]
    output_token_ids: list[int]
    position: int
    request_id: str
    drafted: Sequence[int] = ()

    @property
    def history(self) -> list[int]:
        """The output, then the draft tokens."""
        return [*self.output_token_ids, *self.drafted] if self.drafted else self.output_token_ids


@dataclass(frozen=True, eq=False)
class TokenMasks:
    """Masks of some of `count` rows. `words`, int32 [len(rows), words], has the bits of the tokens that each
    of `rows` may get; token 0 is the lowest bit of the first word. Other rows may get any token.
    """

    words: np.ndarray
    rows: list[int]
    count: int

    @functools.cached_property
    def addresses(self) -> np.ndarray:
        """The address of each row's words, int64 [count]; 0 for rows that may get any token."""
        first, stride = self.words.ctypes.data, self.words.strides[0]
        addresses = np.zeros(self.count, np.int64)
        addresses[self.rows] = range(first, first + stride * len(self.rows), stride)
        return addresses

    @functools.cached_property
    def numbers(self) -> np.ndarray:
        """The number of each row's `words`, int32 [count]; -1 for rows that may get any token."""
        numbers = np.full(self.count, -1, np.int32)
        numbers[self.rows] = np.arange(len(self.rows))
        return numbers


def needs_history(params: SamplingParams) -> bool:
    """Return whether the choice of a token depends on the output before it."""
    return params.grammar is not None or _edits_by_history(params)


def _edits_by_history(params: SamplingParams) -> bool:
    return (
        params.repetition_penalty != 1.0
        or params.presence_penalty != 0.0
        or params.frequency_penalty != 0.0
        or params.min_tokens > 0
        or any(len(sequence) > 1 for sequence in params.banned_token_sequences)
    )


def edits_logits(params: SamplingParams) -> bool:
    """Return whether logits are edited before the filters. Masks of grammars do not count: they remove
    tokens and change no others.
    """
    return bool(
        _edits_by_history(params)
        or params.logit_bias
        or params.banned_token_sequences
        or params.allowed_token_ids is not None
    )


_MIN_TEMPERATURE = 1e-30


class SamplingArgs(Structure):
    _fields_ = fields(Path(__file__).parent / "chooser.h", "Sampling")


class RequestParams:
    """The parameters of requests, in arrays with one entry per request. They are read once and kept while the
    same requests run.
    """

    def __init__(self, params: Sequence[SamplingParams], vocab_size: int) -> None:
        self.params = list(params)
        self.table = np.array([_fields(each, vocab_size) for each in params], np.dtype(SamplingArgs))
        """The parameters that the samplers read: those of `SamplingArgs`."""
        self.table_address: int = self.table.ctypes.data
        self.greedy = self.table["temperature"] == 0
        penalties = [(p.repetition_penalty, p.presence_penalty, p.frequency_penalty) for p in params]
        self.penalties = np.array(penalties, np.float32)
        self.penalized = (self.penalties != (1, 0, 0)).any(axis=1)
        self.edits_logits = any(map(edits_logits, params))

    @functools.cached_property
    def listed(self) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """Each request's allowed tokens (empty: all), its biased tokens, and their biases."""
        return [
            (
                np.array(p.allowed_token_ids or (), np.int32),
                np.fromiter(p.logit_bias, np.int32),
                np.fromiter(p.logit_bias.values(), np.float32),
            )
            for p in self.params
        ]

    def describes(self, params: Sequence[SamplingParams]) -> bool:
        """Return whether the arrays were made from exactly these objects."""
        return len(params) == len(self.params) and all(map(operator.is_, params, self.params))

    def device_rows(self, index: np.ndarray, positions: Sequence[int], seeds: np.ndarray) -> list[np.ndarray]:
        """Return the arrays from which the Triton kernels' `read_row` reads: int64 and float64 [3, n]."""
        rows = self.table[index]
        numbers = np.array([rows[name] for name in ("temperature", "min_p_floor", "top_p")], np.float64)
        return [np.array([seeds, positions, rows["top_k"]]), numbers]


def _fields(params: SamplingParams, vocab_size: int) -> tuple[int, int, float, float, float]:
    """Return a request's `SamplingArgs`. A top-k limit that excludes nothing becomes 0."""
    is_greedy = params.temperature == 0
    top_k = params.top_k if 0 < params.top_k < vocab_size and not is_greedy else 0
    temperature = 0.0 if is_greedy else max(params.temperature, _MIN_TEMPERATURE)
    floor = math.log(params.min_p) if params.min_p > 0 else -math.inf
    return params.seed, top_k, params.top_p, temperature, floor


class EditLists(NamedTuple):
    """Edits of a batch's rows, as arrays or as tensors on a device. Each row has four consecutive lists of
    tokens: allowed (empty: all are allowed), biased, forbidden and penalized.
    """

    bounds: Any
    """int32 [rows, 5]: the beginnings of the four lists, and the end of the last one."""
    tokens: Any
    """int32: the lists of all rows."""
    amounts: Any
    """float32 for each of `tokens`: its bias, or its count in the output."""
    factors: Any
    """float32 [rows, 3]: the repetition, presence and frequency penalties."""
    masked: Any
    """int32 [rows]: the number of the row's mask in `masks`; -1 for none."""
    masks: Any
    """int32 [masks, words]: bits of the tokens that grammars allow."""


@dataclass(slots=True, eq=False)
class Batch:
    """Rows of logits [n, vocab], of any float dtype, which sampling does not change; n is at least 1."""

    logits: Tensor
    rows: Sequence[SamplingRow]
    requests: RequestParams
    index: list[int]
    """Number of each row's request in `requests`."""
    edits: EditLists | None
    """Edits of the rows' logits, if there are any."""
    masks: TokenMasks | None

    @property
    def seeds(self) -> np.ndarray:
        return self.requests.table["seed"][np.array(self.index)]

    @property
    def positions(self) -> list[int]:
        return [row.position for row in self.rows]


class TokenChoice(NamedTuple):
    """The tokens of a batch. `token_ids`, int64 [rows], are on the logits' device; entries of failed rows are
    undefined and may be negative. `wait` returns the tokens on the host, where failed rows have some valid
    id, and the failed rows."""

    token_ids: Tensor
    wait: Callable[[], tuple[Tensor, list[int]]]

    @classmethod
    def made(cls, token_ids: Tensor, failed_rows: list[int]) -> TokenChoice:
        """Make a choice that needs no waiting."""
        return cls(token_ids, lambda: (token_ids, failed_rows))


class RowSampler(Protocol):
    """A sampler for one kind of device. All samplers choose the same tokens."""

    on_device: bool
    """Whether kernels choose on the device, so that the host need not wait."""

    def begin(self, batch: Batch) -> TokenChoice:
        """Choose a token for each row. If kernels choose, do not wait for the device."""

    def probabilities(self, batch: Batch) -> Tensor:
        """Return the rows' distributions, float32 [n, vocab]; zeros in rows that fail."""

    def draw_drafts(self, batch: Batch, starts: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Draw draft tokens with noise of `Purpose.DRAFT`, in rounds that began at positions `starts`. Return
        the tokens, int64 [n], and their distributions, float32 [n, vocab].
        """
