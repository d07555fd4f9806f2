"""The memory of running sequences' states: a seat for each row of a step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from engine.host_memory import host_zeros
from engine.recurrent.layout import StateLayout
from engine.upload import upload_to


@dataclass(slots=True)  # not frozen: that takes four times as long to make, for each sequence in each step
class RowSpan:
    """`count` packed rows of one sequence from place `start` on, its state in `seat`. The tokens of places
    below `certain` are its own, those behind are drafted. With `masks`, as `SequenceRows` has them, they are
    rows of a tree from place `tree_start` on.
    """

    seat: int
    start: int
    count: int
    certain: int
    masks: Sequence[int] | None = None
    tree_start: int = 0

    def path(self, place: int, first: int) -> list[int]:
        """The places of the tokens before the row at this one, from position `first` on, in order of their
        positions.
        """
        root = place if self.masks is None else self.tree_start
        places = [*range(first, root)]
        if self.masks is not None:
            mask = self.masks[place - self.start]
            path = [root + bit for bit in range(mask.bit_length() - 1) if mask >> bit & 1]
            places += path[max(first - root, 0) :]
        return places


class LayerSeats(NamedTuple):
    """One layer's part of all seats. `state` and `tail` are those of a grid point, the others belong to the
    places behind it, each at its number modulo the window: the convolution's `inputs`, and of linear
    attention the keys, what is added to the state under each of them, and the logarithms of the decays since
    the last grid point, that token included; on CUDA devices, of that token alone; of a selective scan the
    token's own time instead.
    """

    state: Tensor
    """float32 [seats, heads, key_dim, value_dim]"""
    tail: Tensor
    """[seats, taps - 1, channels]"""
    inputs: Tensor
    """[seats, window, channels]"""
    keys: Tensor
    """float32 [seats, window, key heads, key_dim]"""
    deltas: Tensor
    """float32 [seats, window, heads, value_dim]"""
    decays: Tensor
    """float32 [seats, window, heads, decay_dim]"""


class Seats:
    """A state is at a grid point of tokens that are certain, at the last one or, where drafts were accepted
    since, before it: so a draft is rolled back by forgetting it.
    """

    def __init__(self, layout: StateLayout, count: int, device: torch.device) -> None:
        self.layout = layout
        self._states = _zeros(count * layout.state_bytes, device).view(count, layout.state_bytes)
        self._windows = _zeros(count * layout.window_bytes, device).view(count, layout.window_bytes)
        self._free = list(range(count - 1, -1, -1))
        self._bases = [0] * count
        """The grid point of each state."""
        states, windows = _Views(self._states), _Views(self._windows)
        held = [states.take(torch.float32, layer.state_shape) for layer in layout.layers]
        tails = [states.take(layout.dtype, layer.tail_shape) for layer in layout.layers]
        recent = [
            [
                windows.take(torch.float32, (layout.window, *shape))
                for shape in (
                    (layer.num_key_heads, layer.key_dim),
                    (layer.num_heads, layer.value_dim),
                    (layer.num_heads, layer.decay_dim),
                )
            ]
            for layer in layout.layers
        ]
        inputs = [windows.take(layout.dtype, (layout.window, layer.channels)) for layer in layout.layers]
        self._upload = upload_to(device)
        parts = zip(held, tails, inputs, recent, strict=True)
        self.layers = [LayerSeats(*first, *others) for *first, others in parts]

    @property
    def device(self) -> torch.device:
        return self._states.device

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self) -> int:
        """For a sequence without tokens, until a state is loaded."""
        seat = self._free.pop()
        self._bases[seat] = 0
        return seat

    def position(self, seat: int) -> int:
        """Where its state is."""
        return self._bases[seat]

    def give_back(self, seat: int) -> None:
        self._free.append(seat)

    def run(self, span: RowSpan) -> int:
        """These rows are about to run. Returns where the state is until they have: then it is at the
        last grid point of what is certain of them.
        """
        grid, seat, start = self.layout.grid, span.seat, span.start
        if start == 0:
            self._states[seat].zero_()
            self._bases[seat] = 0
        base = self._bases[seat]
        if not 0 <= start - base <= self.layout.window:  # a made-up sequence: so is its state
            base = start // grid * grid
        end = min(span.certain, start + span.count)
        self._bases[seat] = max(base, end // grid * grid)
        return base

    def move(self, seat: int, first: int, places: Sequence[int]) -> None:
        """The inputs at place `first + places[i]`, of a draft's accepted tokens, go to `first + i`."""
        if not places or places[-1] < len(places):
            return
        moves = first + np.array([places, range(len(places))], np.int64)
        sources, targets = self._upload([moves % self.layout.window])[0]
        for layer in self.layers:
            for rows in (layer.inputs, layer.keys, layer.deltas, layer.decays):
                rows[seat].index_copy_(0, targets, rows[seat].index_select(0, sources))

    def save(self, seat: int, arena: Tensor, blocks: Sequence[int]) -> None:
        """Copy the seat's state to blocks of the pool, uint8 [blocks, block_bytes]."""
        state = self._states[seat]
        for block, part in zip(blocks, state.split(arena.shape[1]), strict=True):
            arena[block, : len(part)] = part

    def load(self, seat: int, arena: Tensor, blocks: Sequence[int], num_tokens: int) -> int:
        """The reverse, of the last grid point of so many tokens: returns that."""
        for block, part in zip(blocks, self._states[seat].split(arena.shape[1]), strict=True):
            part.copy_(arena[block, : len(part)])
        self._bases[seat] = self.layout.position(num_tokens)
        return self._bases[seat]


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
