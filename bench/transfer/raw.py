"""`shm` against a plain memcpy between two processes' memory; `tcp`, also in TLS, against one raw stream; and
the CPU time of pairs that have nothing to do.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from bench.transfer.certificates import Authority
from bench.transfer.process import ProcessObject, RemoteObject
from bench.transfer.row import TransferRow, ratio_row
from bench.transfer.sides import Pair, scattered
from kvtransfer.transports.registry import TransportOptions

TOTAL_BYTES = 256 * 1024 * 1024
MODEL_BLOCK, SMALL_BLOCK = 1792 * 1024, 16 * 1024
"""Bytes of a block of 16 tokens: of a 0.6B model in bfloat16, and of a very small model."""
IDLE_S = 10.0
TRANSPORTS = ("shm", "ucx", "tcp")


def measure(
    transport: str,
    raw: Callable[[Pair], float],
    what: str,
    targets: dict[int, float | None],
    repeats: int,
    start: Callable[..., RemoteObject] = ProcessObject,
    name: str = "",
) -> Iterator[TransferRow]:
    """Yield a figure for each block size in `targets`. `start` starts the pair's sides; `name` is the row's
    name.
    """
    for block_bytes, at_least in targets.items():
        with Pair([transport], block_bytes, TOTAL_BYTES // block_bytes, start=start) as pair:
            order = scattered(pair.num_blocks)
            rounds = [(raw(pair), pair.move(transport, order).seconds) for _ in range(repeats + 1)]
        nbytes = pair.num_blocks * block_bytes
        size = f"blocks of {block_bytes / 1024:.0f} KiB"
        yield ratio_row(f"{name or transport}, {size}", rounds[1:], nbytes, at_least, what)


def shm(repeats: int) -> Iterator[TransferRow]:
    return measure("shm", Pair.memcpy, "memcpy", {MODEL_BLOCK: 0.85, SMALL_BLOCK: None}, repeats)


def tcp(repeats: int) -> Iterator[TransferRow]:
    return measure("tcp", Pair.raw_stream, "raw stream", {MODEL_BLOCK: 0.9, SMALL_BLOCK: 0.9}, repeats)


def tls(repeats: int) -> Iterator[TransferRow]:
    with tempfile.TemporaryDirectory() as folder:
        options = TransportOptions(tls=Authority(Path(folder) / "authority").issue("worker"))

        def start(*arguments: Any) -> ProcessObject:
            return ProcessObject(*arguments, options)

        yield from measure("tcp", Pair.raw_stream, "raw stream", {MODEL_BLOCK: None}, repeats, start, "TLS")


def idle(repeats: int) -> Iterator[TransferRow]:
    """Measure once, over ten seconds: all pairs at the same time, with the processes of each pair counted
    separately.
    """
    with ExitStack() as stack:
        pairs = {name: stack.enter_context(Pair([name], SMALL_BLOCK, 64)) for name in TRANSPORTS}
        for name, pair in pairs.items():
            pair.move(name, range(64))
        time.sleep(1.0)  # the work after the last transfer has ended
        before = {name: pair.cpu_seconds() for name, pair in pairs.items()}
        started = time.monotonic()
        time.sleep(IDLE_S)
        used = {name: pair.cpu_seconds() - before[name] for name, pair in pairs.items()}
        seconds = time.monotonic() - started
    for name, cpu_seconds in used.items():
        yield TransferRow(
            what=f"idle pair over {name}, both processes",
            value=cpu_seconds / seconds * 100,
            unit=" %",
            at_most=0.5,
            ours=f"{cpu_seconds * 1e3:.1f} ms of CPU in {seconds:.0f} s",
            baseline="one core",
        )
