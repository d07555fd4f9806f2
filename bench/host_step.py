"""Times the host's part of a GPU decode step, on any host: scheduling, inputs, commits and outputs.

A worker's engine runs with asynchronous scheduling: it launches each step before the one before it has
finished. The device computes nothing, and replaying a graph costs nothing.

`tandem bench host-step` prints the median; with `--profile` also the time of each function.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import Qwen3Config

from engine.cuda.buckets import Buckets
from engine.cuda.runner import CudaRunner
from engine.engine import Engine
from engine.kv_pool import KVPool
from engine.loader import LoadedModel
from engine.runner import Runner
from engine.step_inputs import StepInputs
from engine.upload import Pinned, Uploader
from protocol.config import ServeConfig
from protocol.requests import EngineRequest
from protocol.sampling import SamplingParams
from speculation.speculator import speculate

_CPU = torch.device("cpu")
_VOCABULARY = 512
"""Small, because the device chooses the tokens."""


class _Event:
    """The event of a finished copy."""

    def record(self) -> None: ...

    def query(self) -> bool:
        return True


class _HostUploader(Uploader):
    """Copies on the host, into memory that is not pinned."""

    def _new_buffer(self, nbytes: int) -> Pinned:
        event: Any = _Event()
        buffer = torch.empty(nbytes, dtype=torch.uint8)
        return Pinned(buffer, buffer.numpy(), event)


class _Nothing:
    """A backend and a decoder that launch nothing."""

    name = "CUDA decoder"
    block_pool, num_tables = 0, 1

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size

    def begin_step(self, metadata: object) -> None: ...

    def forward(self, inputs: StepInputs) -> tuple[Tensor, None]:
        return torch.zeros(len(inputs.logit_rows), _VOCABULARY), None


def _runner(config: ServeConfig, loaded: LoadedModel, pool: KVPool, hidden_layers: tuple[int, ...]) -> Runner:
    nothing: Any = _Nothing(config.block_size)
    runner = CudaRunner(nothing, nothing, _CPU, "none", Buckets.of(config, loaded.max_model_len))
    runner._upload, runner._upload_bucket = _HostUploader(_CPU), _HostUploader(_CPU)
    return runner


def engine_of(folder: Path, sequences: int, max_model_len: int) -> Engine:
    config = Qwen3Config(
        num_hidden_layers=1,
        hidden_size=32,
        intermediate_size=32,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        vocab_size=_VOCABULARY,
        max_position_embeddings=max_model_len,
        architectures=["Qwen3ForCausalLM"],
    )
    config.save_pretrained(folder)
    serve = ServeConfig(
        model=str(folder),
        device="cpu",
        dtype="float32",
        compile="off",
        load_format="dummy",
        max_num_seqs=sequences,
        max_model_len=max_model_len,
    )
    engine = Engine(serve, make_runner=_runner, speculate=speculate)
    _go_ahead(engine)
    return engine


def _go_ahead(engine: Engine) -> None:
    """Let the engine launch steps ahead, as on a GPU."""
    runner: Any = engine._runner
    engine._launcher._ahead_runner = runner


def step_times(engine: Engine, sequences: int, context: int, steps: int) -> list[float]:
    for number in range(sequences):
        prompt = [1 + (number + place) % 100 for place in range(context)]
        sampling = SamplingParams(max_tokens=4 * steps, temperature=0.0, ignore_eos=True)
        engine.add(EngineRequest(request_id=str(number), prompt_token_ids=prompt, sampling=sampling))
    while len(engine.step().outputs) < sequences:
        pass
    times = []
    for _ in range(steps):
        started = time.perf_counter()
        engine.step()
        times.append(time.perf_counter() - started)
    return times


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser("tandem bench host-step", description=__doc__)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--context", type=int, default=1000)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--profile", action="store_true", help="where the time goes, by function")
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        engine = engine_of(Path(folder), args.requests, args.context + 4 * args.steps)
        with cProfile.Profile() as profile:
            if not args.profile:
                profile.disable()
            times = step_times(engine, args.requests, args.context, args.steps)
    milliseconds = statistics.median(times) * 1e3
    print(
        f"host: {milliseconds:.2f} ms a step of {args.requests} requests with {args.context} tokens and more"
    )
    if args.profile:
        pstats.Stats(profile).sort_stats("tottime").print_stats(25)
