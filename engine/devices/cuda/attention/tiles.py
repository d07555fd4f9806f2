"""How large tiles are, for a layer's shape and a device's shared memory. Never by the batch: a row's bits
depend on it.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.triton_support import power_of_two

SPLIT = 512
"""Keys of a split: enough programs for one request with a long context, and parts that weigh little."""

SHORT = 64
"""A sequence with more query rows is a chunk of a prompt: it fills the device without splits, and larger
tiles suit it."""

LEAST_SHARED, HOPPER_SHARED = 99 * 1024, 227 * 1024
"""Bytes that a program may have on every device since Ampere, and on Hopper and Blackwell in data centers."""


@dataclass(frozen=True)
class Tile:
    """`rows` are tokens by heads; `warps` and `stages` are Triton's. Keys are under way in a buffer for every
    two stages after the first: the block table is read in one before.
    """

    rows: int
    keys: int
    warps: int
    stages: int


def tile_of(
    short: bool, head_dims: tuple[int, int], itemsize: int, coded: bool, shared: int = LEAST_SHARED
) -> Tile:
    """For short sequences or chunks, with keys and values of these sizes. `itemsize` is that of what is
    multiplied, `shared` what a program may have. As large as registers hold: `tests.docs.gpu_table`.
    """
    widest, roomy = power_of_two(max(head_dims)), shared >= HOPPER_SHARED
    if itemsize > 2:  # products of float32 are made without matrix units
        return Tile(16, 16, 8, 3)
    if coded:  # codes are expanded in registers
        return Tile(64 if widest <= 128 and not short else 32, 32 if widest <= 256 else 16, 8, 3)
    if widest > 256:
        return Tile(32, 32, 8, 3)
    if short:
        values_a_key = sum(map(power_of_two, head_dims))
        return Tile(32, 64 if widest <= 128 else 32, 4 if widest > 128 and values_a_key <= 384 else 8, 3)
    return Tile(128 if widest <= 128 else 64, 64 if roomy else 32, 8, 5 if widest <= 128 else 3)
