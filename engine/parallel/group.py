"""The ranks of one worker, and the one thing that they exchange within a forward: columns of activations.

Each rank computes some outputs of every linear layer, each of them whole, summed in the order in which one
process alone would. So nothing is ever summed over ranks, and a model's results have the same bits on any
number of them. All-reduced partial sums would move less data between two layers, and change bits.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from typing import NamedTuple

from torch import Tensor

from protocol.errors import TandemError

GATHER_TIMEOUT_S = 10.0
"""A rank that another one waits for longer is lost. They do the same work at the same time."""


class LostRankError(TandemError):
    """A rank of this worker has ended, or does not answer. The worker can't go on without it."""

    def __init__(self, reason: str = "a rank does not answer") -> None:
        super().__init__(reason)


class Columns(NamedTuple):
    """The columns of a row that each rank has: one range after the other, all columns together."""

    parts: tuple[range, ...]

    @property
    def width(self) -> int:
        return self.parts[-1].stop

    def times(self, size: int) -> Columns:
        """Return the columns where each of these stands for `size` of them."""
        return Columns(tuple(range(part.start * size, part.stop * size) for part in self.parts))


class Ranks(ABC):
    """This process' place among the ranks of its worker."""

    shares_memory = False
    """Whether all ranks can look at one KV pool. Otherwise each has a pool for its own heads."""

    def __init__(self, size: int, rank: int) -> None:
        self.rank, self.size = rank, size

    def columns(self, count: int, unit: int = 1) -> Columns:
        """Divide `count` columns evenly, in whole units if there are enough of these for all ranks."""
        if count < unit * self.size:
            unit = 1
        units = -(-count // unit)
        ends = [min(rank * units // self.size * unit, count) for rank in range(self.size + 1)]
        return Columns(tuple(range(*ends) for ends in itertools.pairwise(ends)))

    def own(self, count: int, unit: int = 1) -> range:
        """Return this rank's part of `count` things."""
        return self.columns(count, unit).parts[self.rank]

    @abstractmethod
    def gather(self, part: Tensor, columns: Columns) -> Tensor:
        """Return whole rows, [..., width], of which each rank has some columns, [..., own]. All ranks call it
        in the same order, with as many rows. Raises LostRankError.
        """

    def check(self) -> None:  # noqa: B027
        """Raise LostRankError if a gather within native code did not succeed."""

    @abstractmethod
    def give_up(self) -> None:
        """Let all gathers fail from now on, since a rank is lost. Any thread may call it."""
