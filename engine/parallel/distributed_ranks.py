"""Ranks that gather by torch.distributed: NCCL between GPUs, gloo between CPUs."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.distributed import FileStore, ProcessGroupGloo
from torch.distributed.distributed_c10d import AllgatherOptions
from torch.nn.functional import pad

from engine.parallel import group
from engine.parallel.group import Columns, LostRankError, Ranks

_SLOWEST_S = 60.0
"""The longest wait for a rank to connect, or to gather on GPUs: some load or compile more slowly."""


_OPTIONS = AllgatherOptions()
_OPTIONS.asyncOp = False
"""Whether NCCL runs in a stream of its own. In the current stream, no streams wait for each other."""


class Meeting:
    """The store through which ranks find each other: an anonymous file that forked processes inherit."""

    def __init__(self) -> None:
        self._fd = os.memfd_create("tandem-ranks")

    def store(self, size: int) -> FileStore:
        return FileStore(f"/proc/self/fd/{self._fd}", size)


class DistributedRanks(Ranks):
    """Ranks that gather by a collective call, which CUDA graphs can capture. The first call connects."""

    def __init__(self, size: int, rank: int, meeting: Meeting, device: torch.device) -> None:
        super().__init__(size, rank)
        self.device = device
        self._meeting = meeting
        self._group: Any = None
        self._is_lost = False

    def gather(self, part: Tensor, columns: Columns) -> Tensor:
        if self._is_lost:
            raise LostRankError
        rows, sizes = part.shape[:-1], [len(each) for each in columns.parts]
        sent = part.reshape(rows.numel(), part.shape[-1])
        sent = pad(sent, (0, max(sizes) - part.shape[-1])) if len({*sizes}) > 1 else sent.contiguous()
        got = sent.new_empty((self.size * len(sent), sent.shape[1]))
        try:
            work = self._connected()._allgather_base(got.view(torch.uint8), sent.view(torch.uint8), _OPTIONS)
            if work is not None:
                work.wait()
        except RuntimeError as error:
            raise LostRankError(f"a rank does not answer: {error}") from error
        got = got.view(self.size, *sent.shape)
        if len({*sizes}) == 1:
            return got.transpose(0, 1).reshape(*rows, columns.width)
        parts = [each[:, :size] for each, size in zip(got, sizes, strict=True)]
        return torch.cat(parts, dim=1).view(*rows, columns.width)

    def agree(self, is_so: bool) -> bool:
        """Return whether `is_so` is true on all ranks, which must all call it. Waits for the device."""
        flag = torch.full((1, 1), is_so, dtype=torch.uint8, device=self.device)
        return bool(self.gather(flag, self.columns(self.size)).all())

    def _connected(self) -> Any:
        if self._group is None:
            store = self._meeting.store(self.size)
            store.set_timeout(timedelta(seconds=_SLOWEST_S))
            self._group = _nccl(store, self) if self.device.type == "cuda" else _gloo(store, self)
        return self._group

    def give_up(self) -> None:
        self._is_lost = True
        if self._group is not None and self.device.type == "cuda":
            self._group.abort()


def _nccl(store: FileStore, ranks: Ranks) -> Any:
    from torch.distributed import ProcessGroupNCCL  # missing in CPU builds

    options = ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=_SLOWEST_S)
    return ProcessGroupNCCL(store, ranks.rank, ranks.size, options)


def _gloo(store: FileStore, ranks: Ranks) -> Any:
    options = ProcessGroupGloo._Options()
    options._devices = [ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    options._timeout = timedelta(seconds=group.GATHER_TIMEOUT_S)
    return ProcessGroupGloo(store, ranks.rank, ranks.size, options)
