"""The layout of a sequence's state in recurrent layers: shapes, sizes, and the name of the format."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

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
        """Bytes of a state slot."""
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
