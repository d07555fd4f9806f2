"""The CPU time of a connected pair that has nothing to do."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack

from bench.transfer.raw import SMALL_BLOCK
from bench.transfer.row import TransferRow
from bench.transfer.sides import Pair

IDLE_S = 10.0
TRANSPORTS = ("shm", "ucx", "tcp")


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
