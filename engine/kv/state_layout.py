"""The layout of the state that recurrent layers keep of a sequence: shapes, sizes, the name of the format."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

from protocol.handoff import STATE, SegmentInfo

GRID = 16
"""Tokens between two grid points. So few inputs are read for each token, and few tokens run again after a
hand-off."""
_LINE = 64
"""Each state slot begins at a multiple of so many bytes."""


@dataclass(frozen=True)
class RecurrentLayer:
    """A convolution of `taps` tokens over `channels`, if any, followed by linear attention if `num_heads` is
    not 0: each head's state is a float32 matrix [key_dim, value_dim], and neighbouring heads share their
    keys. Its decay is one number or, with a `decay_dim` of `key_dim`, one for each row of the matrix.
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
    """The convolutions' inputs have this `dtype`. A state slot has room for the inputs of `window` tokens
    after a grid point, drafted ones included; the grid divides it.
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
        """Bytes of the inputs after it."""
        heads = sum(
            layer.num_key_heads * layer.key_dim + layer.num_heads * (layer.value_dim + layer.decay_dim)
            for layer in self.layers
        )
        inputs = sum(layer.channels for layer in self.layers)
        return _aligned(self.window * (4 * heads + self.dtype.itemsize * inputs))

    @property
    def state_slot_bytes(self) -> int:
        """Bytes of a running sequence."""
        return self.state_bytes + self.window_bytes

    def position(self, num_tokens: int) -> int:
        """The last grid point of so many tokens."""
        return num_tokens // self.grid * self.grid

    def with_drafts(self, most: int) -> StateLayout:
        """The layout with room for so many drafted tokens."""
        return replace(self, window=self.grid + -(-most // self.grid) * self.grid)

    def room(self, num_tokens: int) -> int:
        """Room for drafted tokens, where state and inputs of so many are kept and one more is to be run."""
        return self.window - (num_tokens - self.position(num_tokens)) - 1

    def describe(self) -> str:
        """The name of the format, so that unlike states never meet."""
        shapes = (
            f"{layer.channels}x{layer.taps}" + (f"x{layer.num_key_heads}" if layer.num_heads else "")
            + "".join(f"x{size}" for size in layer.state_shape if layer.num_heads)
            for layer in self.layers
        )  # fmt: skip
        return f"state/{str(self.dtype).removeprefix('torch.')}/{'+'.join(shapes)}/{self.grid}"

    def segment(self) -> SegmentInfo:
        """The segment as other workers see it."""
        dtype = str(self.dtype).removeprefix("torch.")
        return SegmentInfo(name=STATE, kind=STATE, dtype=dtype, shape=(self.grid, self.state_bytes))


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _LINE) * _LINE
