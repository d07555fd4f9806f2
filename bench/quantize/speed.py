"""A model's speed with weights in several formats. The engines run in this process, in turns."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bench.turns import in_round
from engine.devices.loaded_model import LoadedModel
from engine.engine import Engine
from engine.load.loader import keep_preloaded
from engine.load.select import load_packed
from protocol.config import ServeConfig
from protocol.requests import EngineRequest
from protocol.sampling import SamplingParams


@dataclass(frozen=True)
class SpeedLoad:
    """Lengths of prompts and answers, numbers of concurrent requests, and rounds to take medians over."""

    prompt: int
    context: int
    output: int
    concurrencies: Sequence[int]
    rounds: int

    @property
    def longest(self) -> int:
        return max(self.prompt, self.context) + self.output

    @property
    def tokens(self) -> int:
        """Return the tokens of all requests at the highest concurrency."""
        return max(self.concurrencies) * (self.context + self.output)


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


def measure(engines: Mapping[str, Engine], lengths: SpeedLoad) -> dict[str, Speed]:
    """Return the medians over rounds, by engine name. The engines take turns."""
    prefills: dict[str, list[float]] = defaultdict(list)
    decodes: dict[tuple[str, int], list[float]] = defaultdict(list)
    for number in range(lengths.rounds):
        order = in_round(list(engines.items()), number)
        for name, engine in order:
            started = time.perf_counter()
            answer(engine, f"{number}", 1, lengths.prompt, 1)
            prefills[name].append(lengths.prompt / (time.perf_counter() - started))
        for concurrency in lengths.concurrencies:
            for name, engine in order:
                load = f"{number}-{concurrency}"
                seconds = answer(engine, load, concurrency, lengths.context, lengths.output)
                decodes[name, concurrency].append((lengths.output - 1) * concurrency / seconds)
    return {
        name: Speed(
            statistics.median(prefills[name]),
            {each: statistics.median(decodes[name, each]) for each in lengths.concurrencies},
        )
        for name in engines
    }


def answer(engine: Engine, name: str, count: int, prompt: int, output: int) -> float:
    """Return the seconds from the last of `count` requests' first token until all have ended."""
    begin(engine, name, count, prompt, output)
    started = time.perf_counter()
    while engine.has_work():
        engine.step()
    return time.perf_counter() - started


def begin(engine: Engine, name: str, count: int, prompt: int, output: int) -> None:
    """Add `count` requests and step until each has a first token."""
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
