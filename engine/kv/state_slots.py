"""The states that recurrent layers keep of running sequences: their layout, and the memory of each slot."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from engine.copies import host_zeros, upload_to
from protocol.handoff import STATE, SegmentInfo

GRID = 16
"""Tokens between two grid points: few, so that each token reads few inputs since the last grid point, and few
tokens run again after a hand-off."""
_LINE = 64
"""Alignment of state slots in bytes."""


@dataclass(frozen=True)
class RecurrentLayer:
    """A convolution of `taps` tokens over `channels`, if any, followed by linear attention if `num_heads` is
    not 0. Each head's state is a float32 matrix [key_dim, value_dim], and neighbouring heads share keys. The
    decay is one number or, if `decay_dim` is `key_dim`, one number for each row of the matrix.
    """

    channels: int
    taps: int
    num_heads: int = 0
    num_key_heads: int = 0
    key_dim: int = 0
    value_dim: int = 0
    decay_dim: int = 1

    @property
    def state_shape(self) -> tuple[int, int, int]:
        return self.num_heads, self.key_dim, self.value_dim

    @property
    def tail_shape(self) -> tuple[int, int]:
        """The shape of the convolution's inputs before a grid point."""
        return self.taps - 1, self.channels


@dataclass(frozen=True)
class StateLayout:
    """Layout of a state slot. The convolutions' inputs have this `dtype`. The slot has room for the inputs of
    `window` tokens after a grid point, draft tokens included; `grid` divides `window`.
    """

    layers: tuple[RecurrentLayer, ...]
    dtype: torch.dtype
    grid: int = GRID
    window: int = GRID

    @property
    def state_bytes(self) -> int:
        """Bytes of a sequence's state at a grid point."""
        states = sum(math.prod(layer.state_shape) for layer in self.layers)
        tails = sum(math.prod(layer.tail_shape) for layer in self.layers)
        return _aligned(4 * states + self.dtype.itemsize * tails)

    @property
    def window_bytes(self) -> int:
        """Bytes of the inputs after the grid point."""
        heads = sum(
            layer.num_key_heads * layer.key_dim + layer.num_heads * (layer.value_dim + layer.decay_dim)
            for layer in self.layers
        )
        inputs = sum(layer.channels for layer in self.layers)
        return _aligned(self.window * (4 * heads + self.dtype.itemsize * inputs))

    @property
    def state_slot_bytes(self) -> int:
        return self.state_bytes + self.window_bytes

    def position(self, num_tokens: int) -> int:
        """Return the last grid point in `num_tokens` tokens."""
        return num_tokens // self.grid * self.grid

    def with_drafts(self, most: int) -> StateLayout:
        """Return the layout with room for `most` draft tokens."""
        return replace(self, window=self.grid + -(-most // self.grid) * self.grid)

    def room(self, num_tokens: int) -> int:
        """Return how many draft tokens have room after `num_tokens` computed tokens and one more to run."""
        return self.window - (num_tokens - self.position(num_tokens)) - 1

    def describe(self) -> str:
        """Return the name of the format, so that states of different formats are never mixed."""
        shapes = (
            f"{layer.channels}x{layer.taps}" + (f"x{layer.num_key_heads}" if layer.num_heads else "")
            + "".join(f"x{size}" for size in layer.state_shape if layer.num_heads)
            for layer in self.layers
        )  # fmt: skip
        return f"state/{str(self.dtype).removeprefix('torch.')}/{'+'.join(shapes)}/{self.grid}"

    def segment(self) -> SegmentInfo:
        """Return the state's segment in the form that other workers read."""
        dtype = str(self.dtype).removeprefix("torch.")
        return SegmentInfo(name=STATE, kind=STATE, dtype=dtype, shape=(self.grid, self.state_bytes))


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _LINE) * _LINE


@dataclass(slots=True)  # not frozen: that would make it four times as slow to construct
class RowSpan:
    """`count` packed rows of one sequence from place `start` on, with the state in `state_slot`. Tokens at
    places below `certain` are the sequence's own, the others are draft tokens. With `masks`, like those of
    `SequenceRows`, the rows belong to a tree that begins at place `tree_start`.
    """

    state_slot: int
    start: int
    count: int
    certain: int
    masks: Sequence[int] | None = None
    tree_start: int = 0

    def path(self, place: int, first: int) -> list[int]:
        """Return the places of the tokens before the row at `place`, by position, from `first` on."""
        root = place if self.masks is None else self.tree_start
        places = [*range(first, root)]
        if self.masks is not None:
            mask = self.masks[place - self.start]
            path = [root + bit for bit in range(mask.bit_length() - 1) if mask >> bit & 1]
            places += path[max(first - root, 0) :]
        return places


class LayerStateSlots(NamedTuple):
    """One layer's part of all state slots. `state` and `tail` belong to a grid point. The other tensors have
    an entry for each place after it, at the place modulo the window: the convolution's `inputs`; for linear
    attention the `keys`, the `deltas` added to the state under these keys, and the `decays`. A decay is the
    sum of logarithms since the last grid point, own token included; on CUDA devices the token's logarithm
    only; for a selective scan the token's time.
    """

    state: Tensor
    """float32 [state slots, heads, key_dim, value_dim]"""
    tail: Tensor
    """[state slots, taps - 1, channels]"""
    inputs: Tensor
    """[state slots, window, channels]"""
    keys: Tensor
    """float32 [state slots, window, key heads, key_dim]"""
    deltas: Tensor
    """float32 [state slots, window, heads, value_dim]"""
    decays: Tensor
    """float32 [state slots, window, heads, decay_dim]"""


class StateMemory(Protocol):
    """Blocks of a pool, uint8 [num_blocks, block_bytes], indexed by a block and a range of its bytes."""

    @property
    def shape(self) -> torch.Size: ...
    def __getitem__(self, place: tuple[int, slice], /) -> Tensor: ...
    def __setitem__(self, place: tuple[int, slice], value: Tensor, /) -> None: ...


class StateSlots:
    """State slots of running sequences. A slot's state is at a grid point of certain tokens: the last one or,
    if drafts were accepted since, an earlier one. So rejecting a draft needs no roll-back.
    """

    on_load: Callable[[int, int], None] = staticmethod(lambda state_slot, num_tokens: None)
    """A function called after a state is loaded, with the slot and the number of tokens."""
    on_move: Callable[[int, int, Sequence[int]], None] = staticmethod(lambda state_slot, first, places: None)
    """A function called before inputs are moved, with the arguments of `move`."""

    def __init__(self, layout: StateLayout, count: int, device: torch.device) -> None:
        self.layout = layout
        self._states = _zeros(count * layout.state_bytes, device).view(count, layout.state_bytes)
        self._windows = _zeros(count * layout.window_bytes, device).view(count, layout.window_bytes)
        self._free = list(range(count - 1, -1, -1))
        self._bases = [0] * count
        """The grid point of each slot's state."""
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
        self.layers = [LayerStateSlots(*first, *others) for *first, others in parts]

    @property
    def device(self) -> torch.device:
        return self._states.device

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self) -> int:
        """Take a slot. It has the state of a sequence without tokens until a state is loaded."""
        state_slot = self._free.pop()
        self._bases[state_slot] = 0
        return state_slot

    def position(self, state_slot: int) -> int:
        return self._bases[state_slot]

    def give_back(self, state_slot: int) -> None:
        self._free.append(state_slot)

    def run(self, span: RowSpan) -> int:
        """Begin to run these rows. Return the state's position before them; after them, the state is at the
        last grid point of their certain tokens.
        """
        grid, state_slot, start = self.layout.grid, span.state_slot, span.start
        if start == 0:
            self._states[state_slot].zero_()
            self._bases[state_slot] = 0
        base = self._bases[state_slot]
        if not 0 <= start - base <= self.layout.window:  # a made-up sequence with a made-up state
            base = start // grid * grid
        end = min(span.certain, start + span.count)
        self._bases[state_slot] = max(base, end // grid * grid)
        return base

    def move(self, state_slot: int, first: int, places: Sequence[int]) -> None:
        """Move the inputs of a draft's accepted tokens from place `first + places[i]` to `first + i`."""
        if not places or places[-1] < len(places):
            return
        self.on_move(state_slot, first, places)
        moves = first + np.array([places, range(len(places))], np.int64)
        sources, targets = self._upload([moves % self.layout.window])[0]
        for layer in self.layers:
            for rows in (layer.inputs, layer.keys, layer.deltas, layer.decays):
                rows[state_slot].index_copy_(0, targets, rows[state_slot].index_select(0, sources))

    def save(self, state_slot: int, memory: StateMemory, blocks: Sequence[int]) -> None:
        """Copy the slot's state to `blocks` of the pool's `memory`."""
        state = self._states[state_slot]
        for block, part in zip(blocks, state.split(memory.shape[1]), strict=True):
            memory[block, : len(part)] = part

    def load(self, state_slot: int, memory: StateMemory, blocks: Sequence[int], num_tokens: int) -> int:
        """Load the state at the last grid point in `num_tokens` tokens, and return that point."""
        for block, part in zip(blocks, self._states[state_slot].split(memory.shape[1]), strict=True):
            part.copy_(memory[block, : len(part)])
        self.on_load(state_slot, num_tokens)
        self._bases[state_slot] = self.layout.position(num_tokens)
        return self._bases[state_slot]

    def exchange(self, state_slot: int, num_tokens: int, replaced: Callable[[Tensor], Tensor]) -> None:
        """Replace a slot's state, uint8 [state_bytes], by one that another rank has loaded."""
        self._states[state_slot].copy_(replaced(self._states[state_slot]))
        self._bases[state_slot] = self.layout.position(num_tokens)


class _Views:
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
