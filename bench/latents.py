"""Latent attention with latents in the pool against the same model's expanded keys and values.

    python -m bench.latents [--heads 16] [--context 2048] [--requests 8] [--chunk 256] [--threads 2]

Steps of a small model with DeepSeek-V3's attention, but for its number of heads, over made-up contexts; both
take turns. `--enable-lora` is what expands.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time

import torch
from transformers import DeepseekV3Config

from engine.engine import Engine
from engine.pool_layout import TARGET
from engine.profiling import ProfilingRun
from protocol.config import ServeConfig

ROUNDS = 7


def write_config(folder: str, heads: int) -> None:
    DeepseekV3Config(
        vocab_size=512,
        hidden_size=1024,
        intermediate_size=1024,
        num_hidden_layers=2,
        first_k_dense_replace=2,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        q_lora_rank=None,
    ).save_pretrained(folder)


class Steps:
    """Forwards of `count` sequences, each of `rows` tokens that end a context."""

    def __init__(self, engine: Engine, count: int, rows: int, context: int) -> None:
        self._profiling = ProfilingRun(engine.blocks, engine._runner, context)
        sequences = self._profiling.sequences(count, context, 0)
        assert sequences is not None
        self._sequences = sequences
        for sequence in sequences:
            sequence.num_computed = context - rows

    def milliseconds(self) -> float:
        started = time.perf_counter()
        self._profiling.forward(self._sequences, wants_hidden=False)
        return 1e3 * (time.perf_counter() - started)

    def free(self) -> None:
        self._profiling.free()


def make_engine(model: str, expanded: bool, context: int, requests: int) -> Engine:
    engine = Engine(
        ServeConfig(
            model=model,
            load_format="dummy",
            dtype="bfloat16",
            device="cpu",
            compile="off",
            max_model_len=context,
            max_num_seqs=requests,
            enable_lora=expanded,
            enable_prefix_caching=False,
            log_level="warning",
        )
    )
    for layer in engine.pool.layers(TARGET):
        for side in layer.sides:
            side.values.normal_()
    return engine


def main() -> None:
    parser = argparse.ArgumentParser(description="Latents in the pool against expanded keys and values.")
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--context", type=int, default=2048, help="tokens of each request")
    parser.add_argument("--requests", type=int, default=8, help="in a decode step")
    parser.add_argument("--chunk", type=int, default=256, help="tokens of a prompt in a step")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    context, requests, chunk = arguments.context, arguments.requests, arguments.chunk
    with tempfile.TemporaryDirectory() as folder:
        write_config(folder, arguments.heads)
        engines = [make_engine(folder, expanded, context, requests) for expanded in (False, True)]
    print(f"bytes of a token: latents {engines[0].pool.token_bytes}, expanded {engines[1].pool.token_bytes}")
    for name, shape in {
        f"first chunk of {chunk}": (1, chunk, chunk),
        f"last chunk of {chunk} of {context}": (1, chunk, context),
        f"decode 1 at {context}": (1, 1, context),
        f"decode {requests} at {context}": (requests, 1, context),
    }.items():
        steps = [Steps(engine, *shape) for engine in engines]
        rounds = [[each.milliseconds() for each in steps] for _ in range(1 + ROUNDS)][1:]
        latents, expanded = (statistics.median(column) for column in zip(*rounds, strict=True))
        print(f"{name}: latents {latents:.1f} ms, expanded {expanded:.1f} ms, ratio {latents / expanded:.2f}")
        for each in steps:
            each.free()


if __name__ == "__main__":
    main()
