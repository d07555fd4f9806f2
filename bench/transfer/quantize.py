"""Speed of packing KV blocks for the wire and placing them in a pool, against memcpy of the same bytes.

`python -m bench.transfer.quantize --threads 1` prints GB/s of the sender's pool (bfloat16), best of
interleaved repeats, for blocks of the bundled model (32 KiB) and of a 0.6B model (1.75 MiB).
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import numpy as np
import torch

from kvtransfer.blocks.checksum import Mode, piece_checksum
from kvtransfer.blocks.convert import Converter
from kvtransfer.blocks.layout import block_bytes, wire_segments
from kvtransfer.blocks.quantize import Quantizer
from protocol.handoff import SegmentInfo

POOL_BYTES = 256 * 1024 * 1024
PIECE_BYTES = 16 * 1024 * 1024
SHAPES = {"tandem-code-10m": (4, 2, 16, 2, 64), "0.6B": (28, 2, 16, 8, 128)}


class Side:
    """A pool of random numbers, and what can be done with one piece of its blocks."""

    def __init__(self, shape: tuple[int, ...], dtype: str = "bfloat16") -> None:
        self.segments = (SegmentInfo(name="target", dtype=dtype, shape=shape),)
        self.block_bytes = block_bytes(self.segments)
        self.num_blocks = POOL_BYTES // self.block_bytes
        values = torch.randn(self.num_blocks * self.block_bytes // 2).to(torch.bfloat16)
        self.pool = memoryview(bytearray(values.view(torch.uint8).numpy().tobytes()))
        self.piece = PIECE_BYTES // self.block_bytes
        self.order = np.random.default_rng(0).permutation(self.num_blocks)
        self.at = 0

    def next_blocks(self) -> np.ndarray:
        """Other blocks at each call, so that none is in the cache."""
        self.at = (self.at + self.piece) % (self.num_blocks - self.piece)
        return self.order[self.at : self.at + self.piece]


def measures(shape: tuple[int, ...]) -> dict[str, Callable[[], object]]:
    """What is timed, by name; each handles one piece."""
    side = Side(shape)
    other_size = (*shape[:2], 24, *shape[3:])
    target_bytes = bytearray(POOL_BYTES)
    target = memoryview(target_bytes)
    full = np.full(side.piece, shape[2])
    positions = np.arange(side.piece)
    num_tokens = side.piece * shape[2]
    staged = memoryview(bytearray(PIECE_BYTES))
    arrays = [np.frombuffer(buffer, dtype=np.uint8) for buffer in (side.pool, staged)]

    def memcpy() -> None:
        start = int(side.next_blocks()[0]) % (side.num_blocks - side.piece) * side.block_bytes
        arrays[1][:] = arrays[0][start : start + PIECE_BYTES]

    def packing(wire_dtype: str) -> Callable[[], object]:
        quantizer = Quantizer(side.segments, wire_dtype)
        return lambda: quantizer.pack(side.pool, side.next_blocks(), full, staged)

    def summing(mode: Mode) -> Callable[[], object]:
        return lambda: piece_checksum(mode, side.pool, side.block_bytes, side.next_blocks(), "lease", 0)

    def placing(wire_dtype: str, ours: tuple[SegmentInfo, ...]) -> Callable[[], None]:
        wire = wire_segments(side.segments, wire_dtype)
        converter = Converter(wire, ours, target)
        filled = memoryview(bytearray(PIECE_BYTES))
        if wire_dtype == "auto":
            filled[: side.piece * side.block_bytes] = side.pool[: side.piece * side.block_bytes]
        else:
            Quantizer(side.segments, wire_dtype).pack(side.pool, positions, full, filled)
        count = POOL_BYTES // block_bytes(ours)
        needed = -(-num_tokens // ours[0].shape[2])
        rng = np.random.default_rng(1)
        return lambda: converter.place(filled, positions, rng.permutation(count)[:needed], 0, num_tokens)

    found: dict[str, Callable[[], object]] = {"memcpy": memcpy}
    for wire_dtype in ("int8", "fp8"):
        found[f"pack {wire_dtype}"] = packing(wire_dtype)
        found[f"place {wire_dtype}"] = placing(wire_dtype, side.segments)
    reblocked = (SegmentInfo(name="target", dtype="bfloat16", shape=other_size),)
    wide = (SegmentInfo(name="target", dtype="float32", shape=shape),)
    found["place in blocks of 24"] = placing("auto", reblocked)
    found["place int8 in blocks of 24"] = placing("int8", reblocked)
    found["place as float32"] = placing("auto", wide)
    modes: tuple[Mode, ...] = ("sampled", "full")
    for mode in modes:
        found[f"checksum {mode}"] = summing(mode)
    return found


def measure(shape: tuple[int, ...], repeats: int) -> dict[str, float]:
    """Best GB/s of bfloat16 bytes of the sender's pool, by name."""
    found = measures(shape)
    seconds: dict[str, list[float]] = {name: [] for name in found}
    for repeat in range(repeats + 1):
        for name, run in found.items():
            started = time.perf_counter()
            run()
            if repeat:
                seconds[name].append(time.perf_counter() - started)
    return {name: PIECE_BYTES / 1e9 / min(times) for name, times in seconds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=15)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    rates = {name: measure(shape, arguments.repeats) for name, shape in SHAPES.items()}
    print(f"{'GB/s':28}" + "".join(f"{name:>18}" for name in rates))
    for what in next(iter(rates.values())):
        print(f"{what:28}" + "".join(f"{rate[what]:18.2f}" for rate in rates.values()))


if __name__ == "__main__":
    main()
