"""What adapters cost: decoding 16 requests over 8 of them, against 16 of the model's own, in one engine.

    python -m bench.lora [--model NAME or a shape of bench.shapes] [--requests 16] [--adapters 8] [--rank 16]

Both in turn, in each round; the median of the rounds counts. The adapters have random tensors beside all
linear layers but the head.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file

from bench.shapes import SHAPES, write_shape
from engine.engine import Engine
from engine.lora.files import CONFIG, TENSORS, LinearShape
from engine.lora.table import Adapters
from models.bundled import bundled_path
from protocol.adapters import Adapter
from protocol.config import ServeConfig
from protocol.requests import EngineRequest
from protocol.sampling import SamplingParams

PROMPT = list(range(100, 164))


def write_adapter(folder: Path, linears: Mapping[str, LinearShape], rank: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for path, shape in linears.items():
        for side, size in ("A", (rank, shape.inputs)), ("B", (shape.outputs, rank)):
            tensor = torch.randn(size, generator=generator) * 0.01
            tensors[f"base_model.model.{path}.lora_{side}.weight"] = tensor.bfloat16()
    folder.mkdir()
    (folder / CONFIG).write_text(json.dumps({"peft_type": "LORA", "r": rank, "lora_alpha": rank}))
    save_file(tensors, folder / TENSORS)


def load_adapters(table: Adapters, folder: Path, count: int, rank: int) -> list[Adapter]:
    adapters = []
    for number in range(count):
        path = folder / f"adapter-{number}"
        write_adapter(path, table.linears, rank, number)
        adapters.append(table.load(path.name, str(path)))
    return adapters


def run(engine: Engine, adapters: Sequence[Adapter | None], requests: int, tokens: int) -> float:
    """Seconds from the first step on in which all requests decode."""
    for number in range(requests):
        sampling = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
        adapter = adapters[number % len(adapters)]
        engine.add(
            EngineRequest(
                request_id=str(number),
                prompt_token_ids=[*PROMPT, number],
                sampling=sampling,
                adapter=adapter,
            )
        )
    begun: set[str] = set()
    while len(begun) < requests:
        begun |= {output.request_id for output in engine.step().outputs}
    started = time.perf_counter()
    while engine.has_work():
        engine.step()
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="tandem-code-10m")
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--adapters", type=int, default=8)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=7)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder, model = Path(name), bundled_path(asked.model)
        if model in SHAPES:
            write_shape(model, folder / "model")
            model = str(folder / "model")
        engine = Engine(
            ServeConfig(
                model=model, max_num_seqs=64, max_model_len=1024, enable_lora=True, max_lora_rank=asked.rank
            )
        )
        assert engine.adapters is not None
        ways: dict[str, list[Adapter | None]] = {
            "the model": [None],
            f"{asked.adapters} adapters": [
                *load_adapters(engine.adapters, folder, asked.adapters, asked.rank)
            ],
        }
        gc.collect()
        gc.freeze()  # as a worker does
        seconds: dict[str, list[float]] = {way: [] for way in ways}
        for _ in range(asked.rounds):
            for way, adapters in ways.items():
                seconds[way].append(run(engine, adapters, asked.requests, asked.tokens))
    plain = statistics.median(seconds["the model"])
    print(f"{asked.requests} requests of {asked.model}, rank {asked.rank}")
    for way, taken in seconds.items():
        rate = asked.requests * (asked.tokens - 1) / statistics.median(taken)
        print(f"{way:12}{rate:9.0f} tokens/s  {plain / statistics.median(taken):6.3f}")


if __name__ == "__main__":
    main()
