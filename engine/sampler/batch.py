"""The sampling parameters of a batch as tensors, built once for as long as the batch stays the same."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from engine.sampler.noise import MAX_NOISE, MIN_NOISE
from protocol.sampling import SamplingParams

_NOISE_SPAN = MAX_NOISE - MIN_NOISE + 0.01
_MIN_TEMPERATURE = 1e-30


class BatchParams:
    """Column vectors are [n, 1], one entry per row; row lists name the rows that a feature concerns."""

    def __init__(self, params: Sequence[SamplingParams], vocab_size: int, device: torch.device) -> None:
        self.params = list(params)
        self.vocab_size = vocab_size
        self.device = device
        self.greedy_rows = self._rows(lambda p: p.is_greedy)
        self.all_greedy = len(self.greedy_rows) == len(self.params)
        self.logprob_rows = self._rows(lambda p: p.logprobs is not None)
        self.penalty_rows = self._rows(_has_penalty)
        self.min_tokens_rows = self._rows(lambda p: p.min_tokens > 0)
        self.banned_sequence_rows = self._rows(lambda p: any(len(s) > 1 for s in p.banned_token_sequences))
        self.allowed_rows = self._rows(lambda p: p.allowed_token_ids is not None)
        self._build_edits()
        self._build_distribution()

    @property
    def edits_logits(self) -> bool:
        return bool(
            self.penalty_rows
            or self.min_tokens_rows
            or self.banned_sequence_rows
            or self.allowed_rows
            or len(self.biased)
            or len(self.banned)
        )

    def describes(self, params: Sequence[SamplingParams]) -> bool:
        """Whether these are the very objects that the tensors were built from."""
        return len(params) == len(self.params) and all(map(operator.is_, params, self.params))

    def _rows(self, concerned: Callable[[SamplingParams], bool]) -> list[int]:
        return [row for row, params in enumerate(self.params) if concerned(params)]

    def _column(self, values: list[float], dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=self.device).unsqueeze(1)

    def _indices(self, values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.device)

    def _build_edits(self) -> None:
        """Flat indices into [n, vocab] of biased and banned tokens; factors of rows with penalties."""
        biased = {
            row * self.vocab_size + token: bias
            for row, params in enumerate(self.params)
            for token, bias in params.logit_bias.items()
        }
        self.biased = self._indices(list(biased))
        self.bias = torch.tensor(list(biased.values()), device=self.device)
        self.banned = self._indices(
            [
                row * self.vocab_size + sequence[0]
                for row, params in enumerate(self.params)
                for sequence in params.banned_token_sequences
                if len(sequence) == 1
            ]
        )
        disallowed = torch.ones(len(self.allowed_rows), self.vocab_size, dtype=torch.bool)
        for index, row in enumerate(self.allowed_rows):
            disallowed[index, self.params[row].allowed_token_ids] = False
        self.disallowed = disallowed.to(self.device)
        penalized = [self.params[row] for row in self.penalty_rows]
        self.penalty_factors = torch.tensor(
            [
                [p.repetition_penalty for p in penalized],
                [p.presence_penalty for p in penalized],
                [p.frequency_penalty for p in penalized],
            ],
            device=self.device,
        )

    def _build_distribution(self) -> None:
        """Open rows have no filter; greedy ones keep their greatest value alone, and get no noise.

        `row_floor` is what a row's tokens must reach whatever the filters: no noise lifts those further down.
        """
        params = self.params
        greedy = [p.is_greedy for p in params]
        self.seeds = self._indices([p.seed for p in params])
        self.temperature = self._column([1.0 if p.is_greedy else max(p.temperature, 1e-30) for p in params])
        self.noise_scale = self._column([0.0 if g else 1.0 for g in greedy]).squeeze(1)
        self.min_p_floor = self._column([math.log(p.min_p) if p.min_p > 0 else -math.inf for p in params])

        limits = [p.top_k if 0 < p.top_k < self.vocab_size and not p.is_greedy else 0 for p in params]
        self.max_top_k = max(limits)
        self.top_k_index = self._column([max(k - 1, 0) for k in limits], torch.int64)
        self.no_top_k = self._column([k == 0 for k in limits], torch.bool)
        self.has_value_filter = self.max_top_k > 0 or any(p.min_p > 0 for p in params)

        top_p_rows = self._rows(lambda p: p.top_p < 1.0 and not p.is_greedy)
        self.top_p_rows = self._indices(top_p_rows)
        self.top_p = self._column([params[row].top_p for row in top_p_rows], torch.float64)

        self.top_k_in_top_p_rows = all(limits[row] for row in top_p_rows)

        open_rows = self._rows(lambda p: not p.is_greedy and not p.min_p > 0 and p.top_p >= 1.0)
        open_rows = [row for row in open_rows if limits[row] == 0]
        self.open_rows = self._indices(open_rows)
        self.all_open = len(open_rows) == len(params)
        self.row_floor = self._column([0.0 if g else -_NOISE_SPAN for g in greedy])
        self.row_floor[open_rows] = math.inf


def _has_penalty(params: SamplingParams) -> bool:
    return (
        params.repetition_penalty != 1.0 or params.presence_penalty != 0.0 or params.frequency_penalty != 0.0
    )
