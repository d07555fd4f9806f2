"""Measures a model's speed with its weights in several formats: engines in this process take turns."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from engine.engine import Engine
from engine.loader import LoadedModel
from engine.preloaded import keep_preloaded
from engine.select_forward import load_packed
from protocol.config import ServeConfig
from protocol.requests import EngineRequest
from protocol.sampling import SamplingParams

PROMPT = 16
"""Tokens of the prompts of requests whose decoding is timed."""


@dataclass(frozen=True)
class Speed:
    """Tokens per second: prefill of one request's prompt, and decoding by number of concurrent requests."""

    prefill: float
    decode: Mapping[int, float]


def make_engine(config: ServeConfig) -> tuple[Engine, int]:
    """Make an engine. Return it and the bytes of its weights."""
    loaded = load_packed(config)
    num_bytes = weight_bytes(loaded)
    keep_preloaded([(config, loaded)])
    engine = Engine(config)
    keep_preloaded([])
    return engine, num_bytes


def weight_bytes(loaded: LoadedModel) -> int:
    if loaded.description is not None:
        return loaded.description.num_bytes
    tensors = [*loaded.model.parameters(), *loaded.model.buffers()]
    return sum({tensor.data_ptr(): tensor.nbytes for tensor in tensors}.values())


def measure(
    engines: Mapping[str, Engine],
    concurrencies: Sequence[int],
    prompt: int,
    output: int,
    rounds: int,
    context: int = PROMPT,
) -> dict[str, Speed]:
    """Return the medians over rounds, by engine name. Prompts have `prompt` tokens for timed prefills and
    `context` tokens for timed decodes; answers have `output` tokens.
    """
    prefills: dict[str, list[float]] = defaultdict(list)
    decodes: dict[tuple[str, int], list[float]] = defaultdict(list)
    for number in range(rounds):
        for name, engine in engines.items():
            started = time.perf_counter()
            answer(engine, f"{number}", 1, prompt, 1)
            prefills[name].append(prompt / (time.perf_counter() - started))
        for concurrency in concurrencies:
            for name, engine in engines.items():
                seconds = answer(engine, f"{number}-{concurrency}", concurrency, context, output)
                decodes[name, concurrency].append((output - 1) * concurrency / seconds)
    return {
        name: Speed(
            statistics.median(prefills[name]),
            {each: statistics.median(decodes[name, each]) for each in concurrencies},
        )
        for name in engines
    }


def answer(engine: Engine, name: str, count: int, prompt: int, output: int) -> float:
    """Return the seconds from the first token of the last of `count` requests until all have ended."""
    begin(engine, name, count, prompt, output)
    started = time.perf_counter()
    while engine.has_work():
        engine.step()
    return time.perf_counter() - started


def begin(engine: Engine, name: str, count: int, prompt: int, output: int) -> None:
    """Add `count` requests and step until each has its first token."""
    for index in range(count):
        token_ids = [3 + (index * 131 + place * 17) % (engine.vocab_size - 3) for place in range(prompt)]
        sampling = SamplingParams(max_tokens=output, temperature=0, ignore_eos=True)
        engine.add(
            EngineRequest(
                request_id=f"{name}-{index}", prompt_token_ids=token_ids, sampling=sampling, cache_salt=name
            )
        )
    begun: set[str] = set()
    while len(begun) < count:
        begun |= {output.request_id for output in engine.step().outputs}
