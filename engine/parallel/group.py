"""The ranks of one worker, and the one thing that they exchange within a forward: columns of activations.

Each rank computes some outputs of every linear layer, each of them whole, summed in the order in which one
process alone would. So nothing is ever summed over ranks, and a model's results have the same bits on any
number of them. All-reduced partial sums would move less data between two layers, and change bits.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from protocol.errors import TandemError

GATHER_TIMEOUT_S = 10.0
"""A rank that another one waits for longer is lost. They do the same work at the same time."""

_JOIN_TIMEOUT_S = 60.0
"""A rank may come so much later than another one, when all have loaded the model."""


class LostRankError(TandemError):
    """A rank of this worker has ended, or does not answer. The worker can't go on without it."""


@dataclass(frozen=True)
class Ranks:
    """This process' place among the ranks of its worker."""

    rank: int
    size: int

    def gather(self, part: Tensor) -> Tensor:
        """Each rank has some of the columns, [..., n], equally many: all of them, [..., size * n].

        Raises LostRankError.
        """
        part = part.contiguous()
        parts = [torch.empty_like(part) for _ in range(self.size)]
        try:
            dist.all_gather(parts, part)
        except RuntimeError as error:
            raise LostRankError(f"a rank does not answer: {error}") from error
        return torch.cat(parts, dim=-1)

    def own(self, count: int) -> range:
        """This rank's part of `count` things, which `size` divides."""
        each = count // self.size
        return range(self.rank * each, (self.rank + 1) * each)


def join(ranks: Ranks, port: int, listener: int | None) -> None:
    """Connect this process with the other ranks, over loopback alone. They meet at `port`, where rank 0
    listens with the socket `listener`. Raises LostRankError.
    """
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    try:
        store = dist.TCPStore(
            "127.0.0.1",
            port,
            ranks.size,
            is_master=listener is not None,
            timeout=timedelta(seconds=_JOIN_TIMEOUT_S),
            master_listen_fd=listener,
        )
        dist.init_process_group(
            "gloo",
            store=store,
            rank=ranks.rank,
            world_size=ranks.size,
            timeout=timedelta(seconds=GATHER_TIMEOUT_S),
        )
    except (RuntimeError, ValueError) as error:
        raise LostRankError(f"the ranks cannot be connected: {error}") from error
