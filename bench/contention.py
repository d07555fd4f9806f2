"""What another program on the same cores costs: with threads that are not waited for, beside OpenMP's.

    python -m bench.contention [--model tandem-code-10m] [--threads 2] [--busy 0,1] [--rounds 5]

Both engines are in one process and run in turn, while so many processes beside them only count. Prints the
medians of a decode step's time and of a prompt's, and the median of the rounds' ratios. Above 1 ours are
faster.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch

import engine.decoder.forward
from bench.ranks import STEPS, WORK, seconds
from bench.record import made_by
from engine.engine import Engine
from kvtransfer.blocks.memory import PoolMemory
from models.bundled import bundled_path
from native.openmp import gomp_parallel
from native.threads import parallel
from protocol.config import ServeConfig


@contextmanager
def busy_processes(count: int) -> Iterator[None]:
    processes = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def make_engines(model: str) -> tuple[Engine, Engine]:
    """With our threads, and with OpenMP's."""
    config = ServeConfig(
        model=model,
        device="cpu",
        enable_prefix_caching=False,
        max_model_len=1024,
        max_num_seqs=16,
        kv_cache_memory_bytes=256 << 20,
    )
    made = []
    for threads in (parallel, gomp_parallel):
        engine.decoder.forward.parallel = threads
        made.append(Engine(config, allocate=lambda nbytes: PoolMemory(nbytes).buffer))
    return made[0], made[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default="tandem-code-10m")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--busy", default="0,1")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    engines = make_engines(bundled_path(arguments.model))
    print(made_by(f"python -m bench.contention {' '.join(sys.argv[1:])}"))
    print(
        f"{arguments.model}, {arguments.threads} threads, {STEPS} steps, medians of {arguments.rounds} rounds"
    )
    print(f"{'':<32}{'ours, ms':>10}{'OpenMP, ms':>12}{'ratio':>7}")
    for busy in map(int, arguments.busy.split(",")):
        with busy_processes(busy):
            rounds = [
                [[seconds(each, *work) * 1e3 for work in WORK.values()] for each in engines]
                for _ in range(arguments.rounds + 1)
            ][1:]
        for index, name in enumerate(WORK):
            ours, theirs = ([times[side][index] for times in rounds] for side in (0, 1))
            ratio = statistics.median(b / a for a, b in zip(ours, theirs, strict=True))
            medians = f"{statistics.median(ours):>10.2f}{statistics.median(theirs):>12.2f}{ratio:>7.2f}"
            print(f"{f'{busy} busy beside: {name}':<32}{medians}")


if __name__ == "__main__":
    main()
