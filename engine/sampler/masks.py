"""Which tokens the rows with a grammar may get."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np


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
        """int64 [count]: of each row's words; 0 for rows that may get any token."""
        first, stride = self.words.ctypes.data, self.words.strides[0]
        addresses = np.zeros(self.count, np.int64)
        addresses[self.rows] = range(first, first + stride * len(self.rows), stride)
        return addresses

    @functools.cached_property
    def numbers(self) -> np.ndarray:
        """int32 [count]: which of the `words` are each row's; -1 for rows that may get any token."""
        numbers = np.full(self.count, -1, np.int32)
        numbers[self.rows] = np.arange(len(self.rows))
        return numbers
