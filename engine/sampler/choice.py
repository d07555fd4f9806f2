"""Tokens that are being chosen."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor


class TokenChoice(NamedTuple):
    """`token_ids`, int64 [rows], lie where the logits do; what a row that fails has there means nothing, and
    may be negative. `wait` brings them to the host, and the rows that failed; those have some token there.
    """

    token_ids: Tensor
    wait: Callable[[], tuple[Tensor, list[int]]]

    @classmethod
    def made(cls, token_ids: Tensor, failed_rows: list[int]) -> TokenChoice:
        """One that needs no waiting."""
        return cls(token_ids, lambda: (token_ids, failed_rows))
