"""KV in one byte a value against KV as the model computes it: memory, decoding of long contexts, accuracy.

    python -m bench.kv_cache [--shape llama-29m] [--context 4096] [--requests 16] [--threads 2]

Decode steps of random models of a real shape, over made-up contexts; formats take turns, so that what else
the machine does hits all of them. Accuracy is the bundled model's on its held-out prompts: at each place its
likeliest next token, and the bits that the true one costs, with all KV before it in the format.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from transformers import AutoConfig, AutoTokenizer
from transformers.utils.logging import disable_progress_bar

from bench.shapes import SHAPES, write_shape
from engine.engine import Engine
from engine.pool_layout import TARGET
from engine.profiling import ProfilingRun
from models.bundled import BUNDLED_MODEL
from protocol.config import ServeConfig
from protocol.outputs import TokenLogprobs
from protocol.requests import EngineRequest
from protocol.sampling import SamplingParams

FORMATS = ("auto", "int8", "fp8")
HELD_OUT = BUNDLED_MODEL.parent / "heldout_prompts.jsonl"


def make_engine(model: Path, kv_cache_dtype: str, pool_bytes: int, **options: Any) -> Engine:
    config = ServeConfig(
        model=str(model),
        dtype="bfloat16",
        device="cpu",
        kv_cache_dtype=kv_cache_dtype,  # type: ignore[arg-type]
        kv_cache_memory_bytes=pool_bytes,
        enable_prefix_caching=False,
        log_level="warning",
    )
    return Engine(msgspec.structs.replace(config, **options))


class Decoding:
    """Forwards of one new token each of `requests` sequences, before which there are `context` - 1 others."""

    def __init__(self, model: Path, kv_cache_dtype: str, requests: int, context: int) -> None:
        config = AutoConfig.from_pretrained(model)
        token_bytes = 4 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
        nbytes = (requests * (context + 16) + config.max_position_embeddings + 16) * token_bytes
        self.engine = make_engine(model, kv_cache_dtype, nbytes, max_num_seqs=requests)
        self.token_bytes = self.engine.pool.token_bytes
        self._fill()
        self._profiling = ProfilingRun(self.engine.blocks, self.engine._runner, context)
        sequences = self._profiling.sequences(requests, context, 0)
        assert sequences is not None
        self._sequences = sequences
        for sequence in sequences:
            sequence.num_computed = context - 1

    def _fill(self) -> None:
        """With KV of no text, but of every magnitude."""
        pool, generator = self.engine.pool, torch.Generator().manual_seed(0)
        rows = pool.groups[TARGET].rows
        for layer in pool.layers(TARGET):
            for side in layer.sides:
                made = rows.encode(torch.randn(side.values.shape[1:], generator=generator).to(rows.dtype))
                side.values.copy_(made.values)
                if side.scales is not None and made.scales is not None:
                    side.scales.copy_(made.scales)

    def step(self) -> float:
        """Its seconds."""
        started = time.perf_counter()
        self._profiling.forward(self._sequences, wants_hidden=False)
        return time.perf_counter() - started


def decode_seconds(decodings: Sequence[Decoding], seconds: float) -> list[float]:
    """Median of a step of each, taken in turns."""
    for decoding in decodings:
        decoding.step()
    rounds: list[list[float]] = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(rounds) < 5:
        rounds.append([decoding.step() for decoding in decodings])
    return [statistics.median(column) for column in zip(*rounds, strict=True)]


@dataclass(frozen=True)
class Accuracy:
    """Of each place of the held-out prompts: the likeliest next token, and bits per byte of the true ones."""

    likeliest: list[int]
    bits_per_byte: float


def accuracy(kv_cache_dtype: str) -> Accuracy:
    engine = make_engine(BUNDLED_MODEL, kv_cache_dtype, 64 << 20)
    tokenizer = AutoTokenizer.from_pretrained(BUNDLED_MODEL)
    prompts = [json.loads(line)["prompt"] for line in HELD_OUT.read_text("utf-8").splitlines()]
    for index, prompt in enumerate(prompts):
        sampling = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=1)
        ids = tokenizer(prompt).input_ids
        engine.add(EngineRequest(request_id=str(index), prompt_token_ids=ids, sampling=sampling))
    found: dict[str, list[TokenLogprobs | None]] = {}
    while engine.has_work():
        for output in engine.step().outputs:
            if output.prompt_logprobs is not None:
                found[output.request_id] = output.prompt_logprobs
    places = [place for index in range(len(prompts)) for place in found[str(index)] if place is not None]
    nats = -sum(place.logprob for place in places)
    return Accuracy(
        [place.top_token_ids[0] for place in places],
        nats / math.log(2) / sum(len(prompt.encode()) for prompt in prompts),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="KV in one byte a value against KV as it is computed.")
    parser.add_argument("--shape", choices=SHAPES, default="llama-29m")
    parser.add_argument("--context", type=int, default=4096, help="tokens of each request")
    parser.add_argument("--requests", type=int, default=16, help="in a step")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--seconds", type=float, default=20.0, help="time spent on decoding")
    arguments = parser.parse_args()
    disable_progress_bar()
    torch.set_num_threads(arguments.threads)
    with tempfile.TemporaryDirectory() as folder:
        write_shape(arguments.shape, Path(folder))
        decodings = [
            Decoding(Path(folder), kv_cache_dtype, arguments.requests, arguments.context)
            for kv_cache_dtype in FORMATS
        ]
        times = decode_seconds(decodings, arguments.seconds)
    accuracies = [accuracy(kv_cache_dtype) for kv_cache_dtype in FORMATS]
    print(
        f"{arguments.shape}: a step of {arguments.requests} requests of {arguments.context} tokens, "
        f"{arguments.threads} threads; the bundled model on {len(accuracies[0].likeliest)} tokens"
    )
    print(f"{'KV':>5}{'bytes a token':>15}{'step, ms':>10}{'speed':>7}{'agreement':>11}{'bits per byte':>15}")
    for name, decoding, seconds, found in zip(FORMATS, decodings, times, accuracies, strict=True):
        equal = sum(map(int.__eq__, found.likeliest, accuracies[0].likeliest)) / len(found.likeliest)
        print(
            f"{name:>5}{decoding.token_bytes:15}{seconds * 1e3:10.1f}{times[0] / seconds:7.2f}"
            f"{equal:11.4f}{found.bits_per_byte:15.4f}"
        )


if __name__ == "__main__":
    main()
