"""Time to first token of a prompt that is computed, or comes back from host memory or from the disk.

    python -m bench.tiers [--model FOLDER | --shape qwen3-0.5b] [--prompt-len 512] [--repeats 5]

Each engine's device pool holds a single prompt, so each prompt evicts the one before it. Of every round's
prompts one is asked for again while it lies in host memory, then when it has left that for the disk, then
once more after the kernel was told to forget the file's pages. Medians over the rounds, and ratios taken
within each; below them what a block's copies cost, beside the decode steps in which a block fills.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import tempfile
import time
from pathlib import Path

from bench.shapes import SHAPES, write_shape
from engine.engine import Engine
from engine.loader import choose_device
from models.bundled import BUNDLED_MODEL
from protocol.config import ServeConfig
from protocol.requests import EngineRequest
from protocol.sampling import SamplingParams

BLOCK_SIZE = 16
HOST_PROMPTS = 2.5
"""Prompts that the host tier holds: a fetch takes at most half of it."""
FLOOD = 4
"""Prompts after which one has left the host tier."""
DECODE_TOKENS = 48


class Bench:
    def __init__(self, model: str, prompt_len: int, dtype: str, compile_mode: str, folder: Path) -> None:
        self.prompt_len = prompt_len
        blocks = (prompt_len + DECODE_TOKENS) // BLOCK_SIZE + 2
        block_bytes = _block_bytes(model, dtype)
        self.config = ServeConfig(
            model=model,
            dtype=dtype,  # type: ignore[arg-type]
            device=choose_device("auto").type,  # type: ignore[arg-type]
            compile=compile_mode,  # type: ignore[arg-type]
            block_size=BLOCK_SIZE,
            max_model_len=prompt_len + DECODE_TOKENS,
            kv_cache_memory_bytes=blocks * block_bytes,
            kv_offloading_size=int(HOST_PROMPTS * blocks) * block_bytes / 2**30,
            kv_disk_path=str(folder),
            kv_disk_size=100 * blocks * block_bytes / 2**30,
        )
        self.folder = folder
        self.engine = Engine(self.config)
        self.block_bytes = self.engine.pool.block_pools[0].shape[1]
        self._rng = random.Random(0)
        self._number = 0

    def fresh_prompt(self) -> list[int]:
        return [self._rng.randrange(1, self.engine.vocab_size) for _ in range(self.prompt_len)]

    def first_token(self, prompt: list[int], max_tokens: int = 1) -> float:
        """Seconds until the first token; the request is served to its end."""
        self._number += 1
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        started = time.perf_counter()
        self.engine.add(EngineRequest(request_id=str(self._number), prompt_token_ids=prompt, sampling=params))
        seconds = None
        while self.engine.has_work():
            if self.engine.step().outputs and seconds is None:
                seconds = time.perf_counter() - started
        assert seconds is not None
        return seconds

    def decode_step(self) -> float:
        """Median seconds of a step that generates one token after a prompt."""
        params = SamplingParams(temperature=0.0, max_tokens=DECODE_TOKENS, ignore_eos=True)
        request = EngineRequest(request_id="d", prompt_token_ids=self.fresh_prompt(), sampling=params)
        self.engine.add(request)
        times = []
        while self.engine.has_work():
            started = time.perf_counter()
            if self.engine.step().num_tokens == 1:
                times.append(time.perf_counter() - started)
        return statistics.median(times)

    def settle(self) -> None:
        """Wait until all is on the disk."""
        assert self.engine.tiers is not None
        while self.engine.tiers.num_disk_queued:
            self.engine.tiers.poll()
            time.sleep(0.001)
        self.engine.tiers.poll()

    def flood(self) -> list[float]:
        times = [self.first_token(self.fresh_prompt()) for _ in range(FLOOD)]
        self.settle()
        return times

    def forget_pages(self) -> None:
        for path in self.folder.glob("worker-*/blocks"):
            fd = os.open(path, os.O_RDONLY)
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)

    def round(self) -> dict[str, float]:
        prompt = self.fresh_prompt()
        computed = [self.first_token(prompt), self.first_token(self.fresh_prompt())]
        host = self.first_token(prompt)
        computed += self.flood()
        disk = self.first_token(prompt)
        computed += self.flood()
        self.forget_pages()
        cold = self.first_token(prompt)
        return {
            "computed": statistics.median(computed),
            "from host memory": host,
            "from the disk (page cache)": disk,
            "from the disk (cold)": cold,
        }


def _block_bytes(model: str, dtype: str) -> int:
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(model)
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    itemsize = 4 if dtype == "float32" else 2
    return config.num_hidden_layers * 2 * BLOCK_SIZE * heads * head_dim * itemsize


def report(bench: Bench, rounds: list[dict[str, float]]) -> None:
    print(f"  {'':28}{'ms':>10}{'computed / this':>18}")
    for name in rounds[0]:
        ratio = statistics.median(times["computed"] / times[name] for times in rounds)
        print(f"  {name:28}{statistics.median(times[name] for times in rounds) * 1e3:10.1f}{ratio:18.1f}")
    counters = bench.engine.counters()
    step = bench.decode_step()
    print(f"  a decode step: {step * 1e3:.2f} ms; a block of {bench.block_bytes / 2**20:.2f} MiB, per copy:")
    for name, seconds, blocks in (
        ("evicted to host memory", "kv_host_save_seconds_total", "kv_host_saved_blocks_total"),
        ("loaded from host memory", "kv_host_load_seconds_total", "kv_host_hit_blocks_total"),
        ("written to the disk", "kv_disk_write_seconds_total", "kv_disk_written_blocks_total"),
        ("read from the disk", "kv_disk_read_seconds_total", "kv_disk_hit_blocks_total"),
    ):
        cost = counters[seconds] / max(1.0, counters[blocks])
        share = cost / (step * BLOCK_SIZE)
        rate = bench.block_bytes / cost / 1e9 if cost else 0.0
        print(f"  {name:28}{cost * 1e3:10.3f} ms {rate:8.2f} GB/s {share:8.2%} of {BLOCK_SIZE} decode steps")
    for name in ("dropped_blocks", "fetch_timeouts", "corrupt_blocks"):
        print(f"  {name}: {counters[f'kv_disk_{name}_total']:.0f}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default=str(BUNDLED_MODEL))
    parser.add_argument("--shape", choices=sorted(SHAPES), help="random weights of this shape instead")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--compile", choices=["auto", "on", "off"], default="auto")
    parser.add_argument("--prompt-len", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=".") as folder:
        model = arguments.model
        if arguments.shape:
            model = str(Path(folder) / "model")
            write_shape(arguments.shape, Path(model))
        bench = Bench(model, arguments.prompt_len, arguments.dtype, arguments.compile, Path(folder) / "kv")
        print(f"{arguments.shape or model}, {arguments.dtype}, prompts of {arguments.prompt_len} tokens")
        bench.round()
        report(bench, [bench.round() for _ in range(arguments.repeats)])
        bench.engine.close()


if __name__ == "__main__":
    main()
