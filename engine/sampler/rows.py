"""The rows of logits as the sampler reads them, and the tokens that grammars let them get."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from protocol.sampling import SamplingParams


@dataclass(slots=True, eq=False)
class SamplingRow:
    """One token to choose: `position` is its absolute position in prompt + output.

    Several rows may belong to one request, each with the `drafted` tokens that would precede its own behind
    the output (or with less of them where `needs_history` says that it does not matter). The output is the
    request's own list, which only grows.
    """

    params: SamplingParams
    prompt_token_ids: list[int]
    output_token_ids: list[int]
    position: int
    request_id: str
    drafted: Sequence[int] = ()

    @property
    def history(self) -> list[int]:
        """The output and what is drafted behind it."""
        return [*self.output_token_ids, *self.drafted] if self.drafted else self.output_token_ids


@dataclass(frozen=True, eq=False)
class TokenMasks:
    """`words` [len(rows), words], int32: the bits of the tokens that each of the `rows` may get, the first
    token's the lowest of the first word. Other rows of the `count` may get any.
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
    """Whether the choice of a token looks at the output before it."""
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
    """Whether a token's chances are not those of its logit alone, whatever is filtered after that. A
    grammar's masks take chances away, and change none.
    """
    return bool(
        _edits_by_history(params)
        or params.logit_bias
        or params.banned_token_sequences
        or params.allowed_token_ids is not None
    )
