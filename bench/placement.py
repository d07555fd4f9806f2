"""`tandem bench placement`: the cost of the router's index of the workers' prefix caches.

For each number of workers a separate process fills an index with prompts, each held by a random prefill and a
random decode worker, and a preamble that all workers hold. Then it looks up prompts that two workers hold,
prompts that no worker holds, and prompts that share only the preamble. Each prompt is looked up once, so that
neither it nor its entries are in the processor's caches.
"""

from __future__ import annotations

import multiprocessing
import random
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Annotated

import psutil
import typer

from bench.options import counts
from protocol.kv_events import CacheFormat
from router.workers.kv_index import KvIndex, block_keys, hash_blocks

BLOCK_SIZE = 16
PREAMBLE_BLOCKS = 64
LOOKUPS = 3000


def _keys(name: str, count: int) -> list[int]:
    return block_keys(random.Random(name).randbytes(16 * count))


class FilledIndex:
    """An index with `entries` different blocks, in prompts of `length` blocks."""

    def __init__(self, entries: int, workers: int, length: int) -> None:
        self.length = length
        self.num_prompts = entries // length
        self.preamble = _keys("preamble", PREAMBLE_BLOCKS)
        self.index: KvIndex[str] = KvIndex()
        before = psutil.Process().memory_info().rss
        slots = [self.index.add_holder(f"worker {worker}") for worker in range(workers)]
        took = []
        for slot in slots:
            self.index.store(slot, self.preamble)
        for number in range(self.num_prompts):
            keys = _keys(f"held {number}", length)
            for slot in random.Random(number).sample(slots, 2):
                began = time.perf_counter()
                self.index.store(slot, keys)
                took.append(time.perf_counter() - began)
        self.bytes = psutil.Process().memory_info().rss - before
        self.store_s, self.longest_store_s = sum(took) / len(took) / length, max(took)

    def held(self, number: int) -> list[int]:
        return _keys(f"held {number}", self.length)

    def unknown(self, number: int) -> list[int]:
        return _keys(f"unknown {number}", self.length)

    def with_preamble(self, number: int) -> list[int]:
        return self.preamble + _keys(f"unknown {number}", self.length - PREAMBLE_BLOCKS)

    def lookup_s(self, prompt: Callable[[int], Sequence[int]]) -> float:
        """Return the median time of a look-up over prompts in random order."""
        prompts = [prompt(random.Random(n).randrange(self.num_prompts)) for n in range(LOOKUPS)]
        times = []
        for keys in prompts:
            began = time.perf_counter()
            self.index.find(keys)
            times.append(time.perf_counter() - began)
        return statistics.median(times)

    def remove_s(self) -> tuple[float, float, float]:
        """Return the seconds of a worker's removal, of the longest of its 2 ms sweeps, and of all sweeps."""
        began = time.perf_counter()
        self.index.remove_holder(0)
        removed = time.perf_counter() - began
        sweeps = []
        remains = True
        while remains:
            began = time.perf_counter()
            remains = self.index.sweep(0.002)
            sweeps.append(time.perf_counter() - began)
        return removed, max(sweeps), sum(sweeps)


def _measure(entries: int, workers: int, length: int) -> None:
    filled = FilledIndex(entries, workers, length)
    blocks, resident = len(filled.index), psutil.Process().memory_info().rss
    print(
        f"{workers} workers, {blocks:,} blocks: {resident / 2**30:.2f} GiB resident, "
        f"{filled.bytes / blocks:.0f} bytes per block\n  store: {filled.store_s * 1e9:.0f} ns per block, "
        f"the longest batch of {length} {filled.longest_store_s * 1e3:.1f} ms"
    )
    for name, prompt in (
        ("at two workers", filled.held),
        ("nowhere", filled.unknown),
        (f"{PREAMBLE_BLOCKS} blocks at all workers", filled.with_preamble),
    ):
        seconds = filled.lookup_s(prompt)
        print(f"  look-up of {length} blocks, {name}: {seconds * 1e6:.1f} us, {1 / seconds:,.0f} per second")
    removed, longest, total = filled.remove_s()
    sweeps = f"then sweeps of at most {longest * 1e3:.1f} ms, {total:.1f} s in all"
    print(f"  removal of a worker: {removed * 1e6:.0f} us, {sweeps}")


def _measure_hashing(length: int) -> None:
    root = CacheFormat(model="m", kv_format="f", block_size=BLOCK_SIZE).root()
    token_ids = random.Random(0).choices(range(100_000), k=length * BLOCK_SIZE)
    times = []
    for _ in range(200):
        began = time.perf_counter()
        hash_blocks(root, token_ids, BLOCK_SIZE)
        times.append(time.perf_counter() - began)
    print(f"hashing {len(token_ids)} tokens: {statistics.median(times) * 1e6:.0f} us, once per prompt")


def main(
    entries: Annotated[int, typer.Option(min=1, help="blocks in the index")] = 10_000_000,
    workers: Annotated[str, typer.Option(help="numbers of workers, comma-separated")] = "256,1024,4096",
    prompt_blocks: Annotated[int, typer.Option(min=PREAMBLE_BLOCKS + 1, help="blocks of a prompt")] = 512,
) -> None:
    """Measure the router's index of prefix caches: memory, look-ups, removals."""
    counted = counts("--workers", workers, most=65536)
    if entries < prompt_blocks:
        raise typer.BadParameter(f"--entries: must be at least --prompt-blocks, {prompt_blocks}")
    _measure_hashing(prompt_blocks)
    for number in counted:
        process = multiprocessing.Process(target=_measure, args=(entries, number, prompt_blocks))
        process.start()
        process.join()
        if process.exitcode:
            raise typer.Exit(1)
