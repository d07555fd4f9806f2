"""How large tiles are, for a layer's shape and a device's shared memory. Never by the batch: a row's bits
depend on it.
"""

from __future__ import annotations

from dataclasses import dataclass

SPLIT = 512
"""Keys of a split: enough programs for one request with a long context, and parts that weigh little."""

SHORT = 64
"""A sequence with more query rows is a chunk of a prompt: it fills the device without splits, and larger
tiles suit it."""

LEAST_SHARED = 99 * 1024
"""Bytes that a program may have on every device since Ampere."""


@dataclass(frozen=True)
class Tile:
    """`rows` are tokens by heads; `warps` and `stages` are Triton's."""

    rows: int
    keys: int
    warps: int
    stages: int


def ceil_div(number: int, divisor: int) -> int:
    return -(-number // divisor)


def power_of_two(number: int) -> int:
    """The next one, from 16 on: what tensor cores multiply."""
    return max(16, 1 << (number - 1).bit_length())


def tile_of(short: bool, head_dims: tuple[int, int], itemsize: int, coded: bool, shared: int) -> Tile:
    """For short sequences or chunks, with keys and values of these sizes. `itemsize` is that of what is
    multiplied, `shared` what a program may have.
    """
    dims = power_of_two(head_dims[0]), power_of_two(head_dims[1])
    rows, keys, buffers = (32, 64, 2) if short else (128, 64, 2)
    if coded or itemsize > 2:
        rows, keys, buffers = min(rows, 64), 32, 1

    def needed() -> int:
        """Bytes of the keys and values under way, queries and weights."""
        return itemsize * ((buffers + (not short)) * keys * sum(dims) + rows * (dims[0] + keys))

    if short:
        shared //= 2  # two programs side by side: one computes while the other waits
    while needed() > shared:
        if buffers > 1:
            buffers -= 1
        elif keys > 32:
            keys //= 2
        elif rows > 32:
            rows //= 2
        elif keys > 16:
            keys //= 2
        else:
            break
    warps = 8 if rows * max(dims) > 64 * 128 or (short and not coded) else 4
    return Tile(rows, keys, warps, 2 * buffers + 1)
