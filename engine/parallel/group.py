"""The ranks of one worker, and their only exchange within a forward: columns of activations.

Each rank computes some outputs of every linear layer. It sums each output completely, in the order of a
single process. So no sum crosses ranks, and a model's results have the same bits on any number of ranks.
All-reducing partial sums would move less data between two layers, but change bits.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from typing import NamedTuple

from torch import Tensor

from protocol.errors import TandemError

GATHER_TIMEOUT_S = 10.0
"""Seconds after which an awaited rank counts as lost. All ranks do the same work at the same time."""


class LostRankError(TandemError):
    """A rank of this worker has ended, or does not answer. The worker can't continue without it."""

    def __init__(self, reason: str = "a rank does not answer") -> None:
        super().__init__(reason)


class Columns(NamedTuple):
    """Each rank's range of a row's columns. The ranges are consecutive and cover the row."""

    parts: tuple[range, ...]

    @property
    def width(self) -> int:
        return self.parts[-1].stop

    def times(self, size: int) -> Columns:
        """Multiply the ranges by `size`: ranges of heads become ranges of their elements."""
        return Columns(tuple(range(part.start * size, part.stop * size) for part in self.parts))


class Ranks(ABC):
    """This process' rank, and its exchange with the other ranks of the worker."""

    shares_memory = False
    """Whether all ranks map one KV pool. Otherwise each rank has a pool for its own heads."""

    def __init__(self, size: int, rank: int) -> None:
        self.rank, self.size = rank, size

    def columns(self, count: int, unit: int = 1) -> Columns:
        """Divide `count` columns evenly among the ranks, in whole units if each rank can get one."""
        if count < unit * self.size:
            unit = 1
        units = -(-count // unit)
        ends = [min(rank * units // self.size * unit, count) for rank in range(self.size + 1)]
        return Columns(tuple(range(*ends) for ends in itertools.pairwise(ends)))

    @abstractmethod
    def gather(self, part: Tensor, columns: Columns) -> Tensor:
        """Return whole rows, [..., width], from the columns that each rank has, [..., own]. All ranks call it
        in the same order, with the same number of rows. Raises LostRankError.
        """

    def check(self) -> None:  # noqa: B027
        """Raise LostRankError if a gather that native code called has failed."""

    @abstractmethod
    def give_up(self) -> None:
        """Make all further gathers fail, since a rank is lost. Any thread may call it."""
