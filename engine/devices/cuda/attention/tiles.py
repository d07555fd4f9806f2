"""How large tiles are, for a layer's shape."""

from __future__ import annotations

from dataclasses import dataclass

from engine.triton_support import power_of_two

SPLIT = 512
"""Keys of a split: enough programs for one request with a long context, and parts that weigh little."""

CHUNK = 65
"""A sequence with as many query rows is a chunk of a prompt: it fills the device without splits, and larger
tiles suit it."""


@dataclass(frozen=True)
class Tile:
    """`rows` are tokens by heads; `warps`, `stages` and `registers` (the most of a thread) are Triton's. Keys
    are under way in a buffer for every two stages after the first: the block table is read in one before.
    """

    rows: int
    keys: int
    warps: int
    stages: int
    registers: int | None = None


def tile_of(chunk: bool, head_dims: tuple[int, int], itemsize: int, coded: bool) -> Tile:
    """For chunks or fewer rows, with keys and values of these sizes. `itemsize` is of what is multiplied.
    `keys` may not depend on `chunk`, since a row's bits depend on it. As large as registers hold:
    `tests.docs.gpu_table`.
    """
    widest = power_of_two(max(head_dims))
    if itemsize > 2:  # products of float32 are made without matrix units
        return Tile(16, 16, 8, 3)
    keys = 32 if widest <= 256 else 16
    if not chunk:
        if widest <= 128 and not coded:
            return Tile(16, keys, 4, 3, 128)
        return Tile(16, keys, 4 if widest <= 128 else 8, 3)  # 128 registers would not hold these
    # With 64 rows Hopper and Blackwell multiply by other instructions, which take codes in another order.
    return Tile(64 if widest <= 128 and not coded else 32, keys, 8, 3)
