"""The memory of running sequences' states: a seat for each row of a step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from engine.host_memory import host_zeros
from engine.recurrent.layout import StateLayout


class LayerSeats(NamedTuple):
    """One layer's part of all seats. `state` and `tail` are those of the last grid point, the others belong
    to the tokens behind it: the convolution's `inputs`, and of linear attention the keys, what is added to
    the state under each of them, and the logarithms of the decay since the grid point, that token included.
    """

    state: Tensor
    """float32 [seats, heads, key_dim, value_dim]"""
    tail: Tensor
    """[seats, taps - 1, channels]"""
    inputs: Tensor
    """[seats, grid, channels]"""
    keys: Tensor
    """float32 [seats, grid, key heads, key_dim]"""
    deltas: Tensor
    """float32 [seats, grid, heads, value_dim]"""
    decays: Tensor
    """float32 [seats, grid, heads]"""


class Seats:
    def __init__(self, layout: StateLayout, count: int, device: torch.device) -> None:
        self.layout = layout
        self._states = _zeros(count * layout.state_bytes, device).view(count, layout.state_bytes)
        self._windows = _zeros(count * layout.window_bytes, device).view(count, layout.window_bytes)
        self._free = list(range(count - 1, -1, -1))
        states, windows = _Views(self._states), _Views(self._windows)
        held = [states.take(torch.float32, layer.state_shape) for layer in layout.layers]
        tails = [states.take(layout.dtype, layer.tail_shape) for layer in layout.layers]
        recent = [
            [
                windows.take(torch.float32, (layout.grid, *shape))
                for shape in (
                    (layer.num_key_heads, layer.key_dim),
                    (layer.num_heads, layer.value_dim),
                    (layer.num_heads,),
                )
            ]
            for layer in layout.layers
        ]
        inputs = [windows.take(layout.dtype, (layout.grid, layer.channels)) for layer in layout.layers]
        parts = zip(held, tails, inputs, recent, strict=True)
        self.layers = [LayerSeats(*first, *others) for *first, others in parts]

    @property
    def is_on_cpu(self) -> bool:
        return self._states.device.type == "cpu"

    def take(self) -> int:
        return self._free.pop()

    def give_back(self, seat: int) -> None:
        self._free.append(seat)

    def clear(self, seat: int) -> None:
        """The state of a sequence without tokens."""
        self._states[seat].zero_()

    def save(self, seat: int, arena: Tensor, blocks: Sequence[int]) -> None:
        """Copy the seat's state to blocks of the pool, uint8 [blocks, block_bytes]."""
        state = self._states[seat]
        for block, part in zip(blocks, state.split(arena.shape[1]), strict=True):
            arena[block, : len(part)] = part

    def load(self, seat: int, arena: Tensor, blocks: Sequence[int]) -> None:
        """The reverse."""
        for block, part in zip(blocks, self._states[seat].split(arena.shape[1]), strict=True):
            part.copy_(arena[block, : len(part)])


class _Views:
    """Parts of each row of bytes, one behind the other."""

    def __init__(self, rows: Tensor) -> None:
        self._rows = rows
        self._end = 0

    def take(self, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
        start, self._end = self._end, self._end + dtype.itemsize * math.prod(shape)
        return self._rows[:, start : self._end].view(dtype).unflatten(1, shape)


def _zeros(nbytes: int, device: torch.device) -> Tensor:
    return (
        host_zeros(nbytes) if device.type == "cpu" else torch.zeros(nbytes, dtype=torch.uint8, device=device)
    )
