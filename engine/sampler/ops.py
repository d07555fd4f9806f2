"""Reductions that torch runs element by element on a CPU and numpy runs with vector instructions."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def argmax_rows(values: Tensor) -> Tensor:
    """int64 [n]: where each row of float32 [n, m] has its maximum, the lowest index among equals."""
    if values.device.type == "cpu":
        return torch.from_numpy(values.numpy().argmax(axis=-1))
    return values.argmax(dim=-1)


def indices_at_least(values: Tensor, floor: Tensor) -> Tensor:
    """int64 [k], ascending: flat indices of the entries of float32 [n, m] with value >= `floor` [n, 1]."""
    if values.device.type == "cpu":
        return torch.from_numpy(np.flatnonzero(values.numpy() >= floor.numpy()))
    return (values >= floor).view(-1).nonzero().view(-1)


def sort_rows_descending(values: Tensor) -> Tensor:
    """The rows of float32 [n, m], each sorted, largest first."""
    if values.device.type == "cpu":
        return torch.from_numpy(np.sort(values.numpy(), axis=-1)).flip(-1)
    return values.sort(dim=-1, descending=True).values
