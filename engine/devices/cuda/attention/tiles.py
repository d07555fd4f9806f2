"""The sizes of tiles for a layer's shape."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from engine.triton_support import power_of_two

SPLIT = 512
"""Keys of a split: enough programs for one request with a long context, and small partial results."""

CHUNK = 65
"""The least query rows of a sequence that are a prefill chunk: they fill the device without splits, and
larger tiles suit them.
"""


class LayerConstants(NamedTuple):
    """The constants of a layer's kernels. A key's values after the first `key_padded` are multiplied
    separately; `tail_padded` is 0 if there are none. `page` is the number of tokens in a block.
    """

    heads: int
    group: int
    key_dim: int
    value_dim: int
    key_padded: int
    tail_padded: int
    value_padded: int
    values_in_keys: bool
    page: int
    fp8: bool


class TileConstants(NamedTuple):
    """The constants of `attend`: a tile has `tokens` rows of `members` heads, and sums `keys` at a time, in
    splits of `split`. `multiplied` is the type that the matrix units multiply.
    """

    members: int
    tokens: int
    keys: int
    split: int
    windowed: bool
    trees: bool
    softcap: bool
    multiplied: Any
    joins: bool


@dataclass(frozen=True)
class Tile:
    """A tile of `rows` (tokens by heads) and `keys`. `warps`, `stages` and `registers` (the most of a thread)
    are Triton's. Two `stages` after the first hold one buffer of keys: the block table is read a stage
    earlier.
    """

    rows: int
    keys: int
    warps: int
    stages: int
    registers: int | None = None


def tile_of(chunk: bool, head_dims: tuple[int, int], itemsize: int, coded: bool) -> Tile:
    """Return the tile for chunks or for fewer rows, with `head_dims` of keys and values and `itemsize` of the
    multiplied dtype. `keys` must not depend on `chunk`, since it changes a row's bits. Tiles are as large as
    registers can hold: `tests.docs.gpu_table`.
    """
    widest = power_of_two(max(head_dims))
    if itemsize > 2:  # products of float32 use no matrix units
        return Tile(16, 16, 8, 3)
    keys = 32 if widest <= 256 else 16
    if not chunk:
        if widest <= 128 and not coded:
            return Tile(16, keys, 4, 3, 128)
        return Tile(16, keys, 4 if widest <= 128 else 8, 3)  # 128 registers would not hold these
    # With 64 rows Hopper and Blackwell multiply by other instructions, which take codes in another order.
    return Tile(64 if widest <= 128 and not coded else 32, keys, 8, 3)
